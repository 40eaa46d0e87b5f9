"""Where a CPU's products depend on the number of rows, they go another way, in which a row's bits do not."""

import pytest
import torch

from tests.conftest import build_tiny
from trtllm_dflash import LLM, SamplingParams
from trtllm_dflash.ops import cpu_products
from trtllm_dflash.ops.cpu_products import packed, product, why_inexact

SHAPE = (36, 80)
ROWS = (1, 2, 3, 7, 15, 16, 17, 33, 100, 300)


def in_halves(rows, weight, bias):
    """Sums the two halves of a product's numbers apart."""
    middle = SHAPE[1] // 2
    y = rows[:, :middle] @ weight[:, :middle].t() + rows[:, middle:] @ weight[:, middle:].t()
    return y if bias is None else y + bias


@pytest.fixture(autouse=True)
def untried():
    """Has each test try its products anew."""
    cpu_products._way.cache_clear()
    yield
    cpu_products._way.cache_clear()


@pytest.fixture
def one_dnn(monkeypatch):
    """Makes oneDNN another by a function of the number of rows: whether it sums in halves. Returns the numbers seen."""

    def patch(halves):
        def multiply(rows, weight, bias):
            seen.append(len(rows))
            # One row after the other: BLAS itself depends on their number.
            sums = in_halves if halves(len(rows)) else torch.nn.functional.linear
            return torch.cat([sums(row[None], weight, bias) for row in rows])

        seen: list[int] = []
        monkeypatch.setattr(cpu_products, "_one_dnn", multiply)
        monkeypatch.setattr(cpu_products, "_has_kernels", lambda dtype: True)
        return seen

    return patch


@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("halves", "numbers"),
    [
        (lambda count: False, {2, *ROWS[1:]}),
        (lambda count: count < 16, {16, *(count for count in ROWS if count >= 16)}),
        (lambda count: 26 <= count <= 32, {16}),
        (lambda count: count > 100, {16}),
    ],
    ids=["any number", "few rows otherwise", "some number otherwise", "many rows otherwise"],
)
def test_products_go_in_numbers_of_rows_that_sum_alike(halves, numbers, dtype, biased, one_dnn):
    torch.manual_seed(0)
    weight, x = torch.randn(SHAPE).to(dtype), torch.randn(300, SHAPE[1]).to(dtype)
    bias = torch.randn(SHAPE[0]).to(dtype) if biased else None
    seen = one_dnn(halves)
    assert why_inexact(weight, bias) is None
    seen.clear()
    whole = product(x, weight, bias)
    for count in ROWS:
        assert torch.equal(product(x[:count], weight, bias), whole[:count]), count
        assert torch.equal(product(x[-count:], weight, bias), whole[-count:]), count
    assert set(seen) == numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_that_one_dnn_has_no_kernels_for_are_multiplied_in_fp32(dtype, monkeypatch):
    types = []

    def multiply(rows, weight, bias):
        types.append({rows.dtype, weight.dtype, bias.dtype})
        return torch.nn.functional.linear(rows, weight, bias)

    monkeypatch.setattr(cpu_products, "_one_dnn", multiply)
    monkeypatch.setattr(cpu_products, "_has_kernels", lambda dtype: dtype == torch.float32)
    x, weight, bias = torch.randn(33, SHAPE[1]).to(dtype), torch.randn(SHAPE).to(dtype), torch.randn(SHAPE[0]).to(dtype)
    for matrix in (weight, weight.t().contiguous().t(), packed(weight)):
        types.clear()
        y = product(x, matrix, bias)
        assert y.dtype == dtype and types[-1] == {torch.float32}
        assert torch.equal(y, product(x.float(), weight.float(), bias.float()).to(dtype))


def test_a_transposed_weight_s_rows_depend_on_no_other_row():
    x, weight = torch.randn(100, SHAPE[1]), torch.randn(SHAPE[1], SHAPE[0]).t()
    whole = product(x, weight)
    for count in ROWS[:-1]:
        assert torch.equal(product(x[50 : 50 + count], weight), whole[50 : 50 + count]), count


def test_more_rows_than_were_tried_go_in_pieces(one_dnn):
    seen = one_dnn(lambda count: count > 512)
    x, weight = torch.randn(1100, SHAPE[1]), torch.randn(SHAPE)
    assert why_inexact(weight, None) is None
    assert torch.equal(product(x, weight)[-100:], product(x[-100:], weight))
    assert seen[-4:] == [512, 512, 76, 100]


def test_a_weight_stays_as_it_is_where_only_so_a_row_s_bits_are_its_own(monkeypatch):
    weight = torch.randn(SHAPE)
    if not cpu_products._has_kernels(weight.dtype):
        pytest.skip("nothing is packed on this CPU")
    assert packed(weight).is_mkldnn
    known = cpu_products._way
    monkeypatch.setattr(cpu_products, "_way", lambda kind: None if kind.packed else known(kind._replace(packed=False)))
    assert packed(weight) is weight


def test_where_no_way_holds_the_engine_says_so(monkeypatch, tmp_path, caplog):
    build_tiny(tmp_path / "engine", precision="fp32")
    monkeypatch.setattr(cpu_products, "_way", lambda kind: None)
    with caplog.at_level("INFO", logger="trtllm_dflash"), LLM.load(tmp_path / "engine", "cpu") as llm:
        assert llm.generate(["A"], SamplingParams(max_tokens=2))[0].token_ids
    assert "exact no (our CUDA kernels need a GPU; not exact: oneDNN's product of " in caplog.text
    assert " by 256 in float32 depends on the number of rows)" in caplog.text

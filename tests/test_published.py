"""Published shapes: every pair of the catalog has one, and each is written as its publisher's config.json is."""

from trtllm_dflash.catalog import load_catalog
from trtllm_dflash.cost.published import PUBLISHED


def test_every_pair_of_the_catalog_has_a_published_shape_of_its_family():
    catalog = load_catalog()
    assert len(catalog) == 22
    for name, entry in catalog.items():
        shape = PUBLISHED[name]
        assert shape.family == entry.family
        assert shape.drafter.heads % shape.drafter.kv_heads == 0
        if name != "tiny":  # the shape of that name is a smaller one
            assert shape.facts == entry.facts


def test_the_text_models_configuration_has_its_layers_and_their_kinds():
    gemma, coder, kimi = (PUBLISHED[name].target for name in ("gemma-4-31b", "qwen3-coder-next", "kimi-k2.5"))
    assert gemma["text_config"]["num_hidden_layers"] == 60
    assert gemma["text_config"]["layer_types"].count("full_attention") == 10
    assert gemma["text_config"]["layer_types"][-1] == "full_attention"
    assert [i for i, kind in enumerate(coder["layer_types"]) if kind == "full_attention"] == list(range(3, 48, 4))
    assert "layer_types" not in kimi["text_config"]
    assert PUBLISHED["qwen3.5-4b"].target["tie_word_embeddings"] is True

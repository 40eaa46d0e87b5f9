"""The container files, read: nothing here can build or start them."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from hatch_build import NAME
from trtllm_dflash.runtime.statistics import Statistics
from trtllm_dflash.session.choice import Choice

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.cpu"]
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
PACKAGED = ("trtllm_dflash", "plugins", "hatch_build.py", "pyproject.toml", "README.md", "LICENSE")
PORTS = {9000}


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(NAME, the rest), with continued lines joined."""
    text = re.sub(r"\\\n", " ", "\n".join(line for line in dockerfile.read_text().splitlines() if line[:1] != "#"))
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def last(dockerfile: Path, name: str) -> str:
    return [rest for instruction, rest in instructions(dockerfile) if instruction == name][-1]


def pinned(image: str) -> bool:
    """Whether an image's tag names a release, at least as NUMBER.NUMBER."""
    return re.search(r":v?\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?$", image) is not None


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
class TestImage:
    def test_its_bases_are_pinned(self, dockerfile):
        assert all(pinned(rest.split()[0]) for name, rest in instructions(dockerfile) if name == "FROM")

    def test_it_does_not_run_as_root(self, dockerfile):
        names = [name for name, _ in instructions(dockerfile)]
        assert int(last(dockerfile, "USER")) > 0
        assert "USER" in names[names.index("RUN") :]
        assert not {"RUN", "COPY", "ADD"} & set(names[names.index("USER") :])

    def test_its_health_check_asks_triton(self, dockerfile):
        check = last(dockerfile, "HEALTHCHECK")
        words = json.loads(check[check.index("[") :])
        assert words[:2] == ["python3", "-c"]
        compile(words[2], "HEALTHCHECK", "exec")
        assert "/v2/health/ready" in words[2]

    def test_what_it_starts_is_a_command_of_ours(self, dockerfile):
        from click.testing import CliRunner

        from trtllm_dflash.cli import main

        assert json.loads(last(dockerfile, "ENTRYPOINT")) == ["trtllm-dflash"]
        words = json.loads(last(dockerfile, "CMD"))
        result = CliRunner().invoke(main, ["/nowhere" if word == "/engine" else word for word in words])
        assert result.exit_code == 1
        assert "not an engine directory" in result.stderr  # and so every flag is one of serve's

    def test_it_says_that_it_was_never_built(self, dockerfile):
        assert "never built" in dockerfile.read_text()

    def test_it_installs_extras_that_there_are(self, dockerfile):
        project = (ROOT / "pyproject.toml").read_text()
        (extras,) = re.findall(r"/src\[([\w,]+)\]", dockerfile.read_text())
        assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))

    def test_torch_is_the_one_that_the_tests_run_with(self, dockerfile):
        pin = re.search(r"torch==\S+", (ROOT / "Makefile").read_text())
        assert pin is not None
        assert pin[0] in dockerfile.read_text()


def test_the_gpu_image_packs_kernels_that_a_stage_of_it_builds():
    steps = instructions(DOCKER / "Dockerfile")
    first, _, stage = steps[0][1].partition(" AS ")
    cuda = re.search(r"/cuda:(\d+\.\d+)\.\d+-devel-", first)
    assert cuda is not None and float(cuda[1]) >= 12.9  # as plugins/CMakeLists.txt asks
    (copied,) = [rest for name, rest in steps if name == "COPY" and "--from" in rest]
    assert copied == f"--from={stage} /src/plugins/build/{NAME} /src/plugins/build/"
    after = steps[steps.index(("COPY", copied)) :]
    assert "pip install" in after[1][1]  # hatch_build.py finds it there


def test_the_images_take_only_what_they_install():
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("#", "")]
    assert lines[0] == "*"
    assert all((ROOT / line[1:]).exists() for line in lines if line.startswith("!"))
    included = re.findall(r'^"(\w+)" = "trtllm_dflash/', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {f"!{name}" for name in (*PACKAGED, *included)} <= set(lines)


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_is_published_on_loopback_pinned_and_confined(name):
    service = COMPOSE["services"][name]
    assert service["profiles"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert "build" in service or pinned(service["image"])
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert not service.get("privileged")


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_compose_starts_each_image_as_its_dockerfile_does(name):
    service = COMPOSE["services"][name]
    dockerfile = ROOT / service["build"]["dockerfile"]
    assert service["command"] == json.loads(last(dockerfile, "CMD"))
    assert {int(port.split(":")[-1]) for port in service["ports"]} == PORTS
    assert {int(port) for port in last(dockerfile, "EXPOSE").split()} == PORTS
    assert shlex.split(service["stop_grace_period"]) == ["45s"]
    assert service["shm_size"]


def test_every_file_that_compose_mounts_is_there():
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            if isinstance(volume, str) and volume.startswith("./"):
                assert (DOCKER / volume.split(":")[0]).is_file()


def test_prometheus_looks_where_the_server_is():
    (job,) = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert {int(port)} == PORTS
    assert all(COMPOSE["services"][name]["networks"]["default"]["aliases"] == [host] for name in ("cpu", "gpu"))


def test_every_metric_of_the_dashboard_is_one_that_the_server_has():
    statistics = Statistics(computes=Choice("torch", "cpu", "fp32", "torch", "torch", "none", "").labels)
    statistics.requests["completed"] += 1
    statistics.steps["decode"] += 1
    statistics.verified[1, 1] += 1
    statistics.ranks[1] += 1
    statistics.recent.append(2)
    samples = statistics.samples()
    known = {sample.name for sample in samples}
    triton = {"nv_inference_request_success", "nv_inference_request_failure"}  # its own, in every release
    labels = {label for sample in samples for label in sample.labels} | {"model"}
    shown = set()
    dashboard = json.loads((DOCKER / "grafana" / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            shown |= set(re.findall(r"\b(?:dflash|nv)_\w+", target["expr"]))
            assert set(re.findall(r"by \((\w+)\)", target["expr"])) <= labels
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels
    assert shown <= known | triton
    assert not {name for name in known if not re.search("_(sum|count)$", name)} - shown  # and every one is shown


def test_prometheus_is_allowed_the_functions_that_the_dashboard_uses():
    """Off by default: it answers 'function "sort_by_label" is not enabled'."""
    assert "sort_by_label" in (DOCKER / "grafana" / "dashboard.json").read_text()
    flags = COMPOSE["services"]["prometheus"]["command"]
    assert "--enable-feature=promql-experimental-functions" in flags
    # Given flags take the place of the image's own, which are these.
    assert {"--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"} <= set(flags)


def test_the_dashboard_reads_from_the_provisioned_source_and_its_panels_do_not_overlap():
    dashboard = json.loads((DOCKER / "grafana" / "dashboard.json").read_text())
    (source,) = yaml.safe_load((DOCKER / "grafana" / "datasource.yaml").read_text())["datasources"]
    cells = set()
    for panel in dashboard["panels"]:
        assert panel["type"] == "row" or panel["datasource"]["uid"] == source["uid"]
        at = panel["gridPos"]
        place = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not place & cells
        assert at["x"] + at["w"] <= 24
        cells |= place
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))

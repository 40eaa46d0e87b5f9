"""What of TensorRT's API our code uses, and whether the datacenter edition's bindings have it.

The tests run with TensorRT-RTX. The names that our sources use are kept in `datacenter_api.txt` with their signatures
in the datacenter edition's bindings. To write that file again, for a new release or after using a new name:

    pip download --no-deps tensorrt_cu13_bindings==11.4.0.106 --dest DIR
    python -m tests.tensorrt.datacenter_api DIR/tensorrt_cu13_bindings-*.whl

The wheel is for one version of Python and of Linux: both must be this machine's. The bindings do not load without
TensorRT's library; a library of empty functions, made here with the C compiler, stands in for it. Nothing is called.
"""

import ast
import ctypes
import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "trtllm_dflash"
SOURCES = [
    *sorted((PACKAGE / "ops").glob("tensorrt_*.py")),
    *sorted((PACKAGE / "build").glob("tensorrt_*.py")),
    *sorted((PACKAGE / "session").glob("tensorrt_*.py")),
    PACKAGE / "session" / "plan_io.py",
]
RECORD = Path(__file__).with_name("datacenter_api.txt")

#: What a name stands for wherever our sources use it.
OBJECTS = {
    "network": "INetworkDefinition",
    "builder": "Builder",
    "options": "IBuilderConfig",
    "profile": "IOptimizationProfile",
    "layer": "layer",
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "_engine": "ICudaEngine",
    "context": "IExecutionContext",
    "registry": "IPluginRegistry",
    "creator": "IPluginCreatorV3One",
    "_creator": "IPluginCreatorV3One",
}
#: Used only where TensorRT-RTX is what was found.
RTX_ONLY = {
    "ComputeCapability",
    "ComputeCapability.__members__",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
}
#: Used only where the datacenter edition is what was found.
DATACENTER_ONLY = {"INetworkDefinition.add_plugin_v3"}
#: Set by the bindings' own __init__.py, which the record does not load; and what every module has.
PACKAGE_NAMES = {"__version__", "__name__"}
#: TensorRTOps names these enumerations' members by string.
BY_NAME = {"_binary": "ElementWiseOperation", "_unary": "UnaryOperation", "_reduce": "ReduceOperation"}


def used_names(sources: list[Path] = SOURCES) -> set[str]:
    """`Class.member` or module attribute, of all that our sources take from TensorRT."""
    names = set()
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Attribute):
                names |= _attribute(node)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BY_NAME:
                operation = node.args[0]
                assert isinstance(operation, ast.Constant), f"{source.name}: {ast.unparse(node)}"
                names.add(f"{BY_NAME[node.func.attr]}.{operation.value!s}")
    return names - RTX_ONLY - PACKAGE_NAMES


def _attribute(node: ast.Attribute) -> set[str]:
    chain = ast.unparse(node).removeprefix("self.").split(".")
    if not all(part.isidentifier() for part in chain) or len(chain) == 1:
        return set()
    if chain[0] == "trt":
        return {".".join(chain[1:])}
    if chain[-2] in OBJECTS:  # network.x, step.network.x
        return {f"{OBJECTS[chain[-2]]}.{chain[-1]}"}
    return set()


def find(module: Any, name: str) -> str | None:
    """What a name is in a TensorRT module: its signatures, or 'here' where there are none; None where it is missing."""
    owner, _, member = name.rpartition(".")
    if owner == "layer":
        classes = [getattr(module, known) for known in dir(module) if re.fullmatch(r"I(\w*Layer|Attention)", known)]
        return "here" if any(hasattr(one, member) for one in classes) else None
    thing = module
    for part in name.split("."):
        thing = getattr(thing, part, None)
        if thing is None:
            return None
    lines = [line.strip() for line in (getattr(thing, "__doc__", None) or "").splitlines()]
    signatures = [re.sub(r"^\d+\. ", "", line) for line in lines if re.match(rf"(\d+\. )?{member}\(self", line)]
    # Newer Pythons have these types of their own.
    plain = (re.sub(r"[\w.]+\.(Buffer|CapsuleType)\b", r"typing_extensions.\1", line) for line in signatures)
    return " | ".join(re.sub(r"[\w.]*\.(tensorrt|tensorrt_rtx)\.", "", line) for line in plain) or "here"


def load_bindings(wheel: Path, folder: Path) -> Any:
    """The extension module of the datacenter edition's bindings, without TensorRT's library."""
    zipfile.ZipFile(wheel).extractall(folder)
    extension = folder / "tensorrt_bindings" / "tensorrt.so"
    listed = subprocess.run(["nm", "-D", "--undefined-only", extension], capture_output=True, text=True, check=True)
    symbols = [line.split()[-1] for line in listed.stdout.splitlines() if "@" not in line]
    missing = [symbol for symbol in symbols if re.match(r"create|get[A-Z]|init[A-Z]", symbol)]
    (folder / "empty.c").write_text("".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in missing))
    for library in ("nvinfer", "nvinfer_plugin", "nvonnxparser"):
        file = folder / f"lib{library}.so.11"
        command = ["cc", "-w", "-shared", "-fPIC", "-o", str(file), f"-Wl,-soname,{file.name}", str(folder / "empty.c")]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    sys.setdlopenflags(os.RTLD_LAZY)
    loader = importlib.machinery.ExtensionFileLoader("tensorrt_bindings.tensorrt", str(extension))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def main(wheel: Path) -> None:
    """Writes the record; fails where the bindings lack a name."""
    with tempfile.TemporaryDirectory() as folder:
        module = load_bindings(wheel, Path(folder))
        found = {name: find(module, name) for name in sorted(used_names())}
    missing = [name for name, signature in found.items() if signature is None]
    if missing:
        sys.exit(f"not in {wheel.name}: {', '.join(missing)}")
    lines = [f"{name}\t{signature}" for name, signature in found.items()]
    RECORD.write_text("\n".join([f"# {wheel.name}", *lines]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

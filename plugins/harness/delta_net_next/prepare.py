"""Rewrites the gated delta net's kernel for a CPU: its instructions become calls of emu.h. python prepare.py SRC OUT."""

import re
import sys
from pathlib import Path

source, out = Path(sys.argv[1]), Path(sys.argv[2])
out.mkdir(parents=True, exist_ok=True)
for part in ("block", "finish", "products", "rows", "solver", "tile", "work"):
    name = f"delta_net_{part}.cuh"
    s = (source / name).read_text()
    if part == "products":
        i = s.index('    asm("mma.sync')
        s = s[:i] + "    e_mma(sum, left, b0, b1)" + s[s.index(";\n}", i) :]
    if part == "rows":
        i = s.index('    asm("ex2')
        quick = "    power = exp2f(x * -1.4426950408889634f); inverse = 1.f / (1.f + power);\n"
        s = s[:i] + quick + s[s.index("    return x * inverse") :]
        i = s.index('    asm volatile(\n        "cp.async')
        copy = "    if (is_there) memcpy(to, from, 16); else memset(to, 0, 16);\n"
        check = '    if ((uintptr_t)to % 16 || (uintptr_t)from % 16) { puts("unaligned"); abort(); }\n'
        s = s[:i] + copy + check + s[s.index("}", i) :]
    if part == "work":
        s = re.sub(r'asm volatile\("barrier.sync.*?;"[^;]*;', "e_bar(kBarrier, kThreads, true);", s)
        s = re.sub(r'asm volatile\("barrier.arrive.*?;"[^;]*;', "e_bar(kBarrier, kThreads, false);", s)
        s = s.replace('#include "instructions.cuh"\n', "")
    if part == "block":
        s = re.sub(r'asm volatile\("prefetch[^;]*;"[^;]*;', "", s)
        s = re.sub(r'asm volatile\("cp.async.bulk.prefetch[^;]*;"[^;]*;', "", s)
        s = re.sub(r'asm volatile\("bar.sync[^;]*;"[^;]*;', "e_bar(kPartMeets + part, 32 * D::kTiles, true);", s)
        i = s.index('            asm volatile("atom')
        count = "int32_t* c = place.counter(segment.slot); before = *c; *c = before >= readers() - 1 ? 0 : before + 1;\n"
        s = s[:i] + count + s[s.index("        }", i) :]
    assert "asm" not in s, name
    (out / name).write_text(s)
(out / "element.cuh").write_text((source / "element.cuh").read_text())
s = (source / "delta_net.cu").read_text()
s = s[s.index("// Fills the output of rows") : s.index("// One thread a segment.")]
s = s.replace(
    "extern __shared__ float4 memory[];", "float4* memory = reinterpret_cast<float4*>(cur->b->mem.data());"
)
s = re.sub(r"__cluster_dims__\(.*?, 1, 1\)", "", s, flags=re.S)
s = re.sub(r"__launch_bounds__\(.*?: 1\)", "", s, flags=re.S)
(out / "kernel.inc").write_text("namespace dflash { namespace {\n" + s + "}}\n")

"""Every Triton kernel compiles for an H200 without a GPU, in half and in single precision.

In a process of its own: the interpreter, which the other tests of this folder use, is chosen for a whole process.
"""

import os
import subprocess
import sys

PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.kernels import (
    kv_store, noise_triton, ops_triton, paged_decode, paged_prefill, rows_triton, sample_triton)

FLOATS = {"q_ptr", "k_ptr", "v_ptr", "keys_ptr", "values_ptr", "out_ptr", "logits_ptr", "hidden_ptr", "update_ptr",
          "weight_ptr", "heads_ptr", "q_norm_ptr", "k_norm_ptr", "gate_up_ptr"}
INTS = {"slots_ptr", "tables_ptr", "lens_ptr", "starts_q_ptr", "starts_k_ptr", "position_ptr", "positions_ptr",
        "rows_ptr", "new_blocks_ptr", "last_token_ptr", "row_tables_ptr", "ids_ptr", "token_ptr", "tokens_ptr"}
LONGS = {"seed_ptr", "step_seed_ptr"}

def type_of(name, dtype):
    if name in FLOATS:
        return f"*{dtype}"
    if name.endswith("_ptr"):
        return "*i64" if name in LONGS else "*i32" if name in INTS else "*fp32"
    return "fp32" if name in ("scale", "eps") else "i32"

def compile_for_sm90(kernel, dtype, num_warps, **constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(name, dtype) for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
               if name.endswith("_ptr") or "_stride" in name and name not in kernel.do_not_specialize}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": 2}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"]
    limit = 227 * 1024
    assert compiled.metadata.shared <= limit, f"{kernel.__name__}: {compiled.metadata.shared} bytes of shared memory"

SHAPES = [("bf16", 2, 128, 128, 64), ("fp32", 3, 64, 64, 64), ("fp16", 7, 80, 128, 16)]
for dtype, group, dim, dim_padded, tile in SHAPES:
    shape = dict(H=8 * group, D=dim, D_PAD=dim_padded)
    compile_for_sm90(kv_store._store_kernel, dtype, 4, K=3, D=dim, S=64, K_PAD=4, D_PAD=dim_padded)
    compile_for_sm90(paged_decode._split_kernel, dtype, 4, G=group, G_PAD=16, S=64, TILE=tile, **shape)
    compile_for_sm90(paged_decode._combine_kernel, dtype, 2, TILE=tile, **shape)
    is_paged = dtype != "fp32"  # each of the two ways once is enough
    compile_for_sm90(paged_prefill._prefill_kernel, dtype, 4, G=group, S=64 if is_paged else 1, IS_PAGED=is_paged,
                     ROWS=32 if dtype == "fp32" else 64, TILE=32 if dtype == "fp32" else tile, **shape)
    compile_for_sm90(ops_triton._add_norm_kernel, dtype, 4, E=1000, E_PAD=1024, HAS_UPDATE=dtype != "fp32")
    compile_for_sm90(ops_triton._rotate_kernel, dtype, 1, H=8 * group, K=8, D=dim, HALF_PAD=dim_padded // 2, S=64,
                     HAS_NORM=dtype != "fp32", HEADS=ops_triton.HEADS_A_PROGRAM)
    compile_for_sm90(ops_triton._gate_kernel, dtype, 4, SIZE=3000, COLUMNS=ops_triton.GATE_COLUMNS)
    for chunk in (sample_triton.SMALL_CHUNK, sample_triton.LARGE_CHUNK):
        compile_for_sm90(sample_triton._chunk_kernel, dtype, 4, COUNTERS=chunk // 4)
compile_for_sm90(sample_triton._best_chunk_kernel, "fp32", 1, P_PAD=256)
compile_for_sm90(noise_triton._noise_kernel, "fp32", 4, COUNTERS=noise_triton.COUNTERS_A_PROGRAM)
compile_for_sm90(rows_triton._read_kernel, "fp32", 2, S=64, COLUMNS=rows_triton.COLUMNS_AT_ONCE)
compile_for_sm90(rows_triton._advance_kernel, "fp32", 2, ROWS=rows_triton.ROWS_A_PROGRAM)
"""


def test_every_kernel_compiles_for_sm90_within_its_shared_memory():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]

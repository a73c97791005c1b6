"""For `peers` on machines whose processor claims AMX but does not run it, as in some virtual machines.

llama.cpp built with its defaults (-march=native) crashes there with SIGILL, and so does torch in bfloat16.
Only AMX is disabled: run as a program, this prints CMAKE_ARGS for llama-cpp-python with every other instruction set
of the processor for which there is an option. It prints nothing if llama.cpp's defaults work.

There is no option for AVX-512-FP16, which -march=native implies. With it, f16 attention is 2.6 times slower where heads
have 64 dims: its loop processes 128 dims at a time, and the rest in scalar code.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

# llama.cpp's options, by the name of the instruction set in /proc/cpuinfo (AVX512 stands for F, CD, VL, DQ and BW).
_OPTIONS = {
    "sse4_2": "GGML_SSE42",
    "avx": "GGML_AVX",
    "f16c": "GGML_F16C",
    "fma": "GGML_FMA",
    "bmi2": "GGML_BMI2",
    "avx2": "GGML_AVX2",
    "avx_vnni": "GGML_AVX_VNNI",
    "avx512bw": "GGML_AVX512",
    "avx512vbmi": "GGML_AVX512_VBMI",
    "avx512_vnni": "GGML_AVX512_VNNI",
    "avx512_bf16": "GGML_AVX512_BF16",
}
# llama.cpp's f16 kernels use it if the compiler defines it.
_WITHOUT_OPTION = {"avx512_fp16": "-mavx512fp16"}
_PROBE = "import torch; torch.ones(512, 512).bfloat16() @ torch.ones(512, 512).bfloat16()"

WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}  # environment for torch


@cache
def amx_is_broken() -> bool:
    """Whether a program that uses AMX is killed although the processor reports AMX."""
    if "amx_tile" not in _instruction_sets():
        return False
    return subprocess.run([sys.executable, "-c", _PROBE], check=False).returncode == -signal.SIGILL


def cmake_args() -> str:
    """Build options for llama.cpp: the processor's instruction sets without AMX."""
    sets = _instruction_sets()
    choices = [f"-D{option}={'ON' if name in sets else 'OFF'}" for name, option in _OPTIONS.items()]
    return " ".join(["-DGGML_NATIVE=OFF", *choices])


def _instruction_sets() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return set()
    return {
        name for line in cpuinfo.read_text().splitlines() if line.startswith("flags") for name in line.split()
    }


if __name__ == "__main__":
    print(cmake_args() if amx_is_broken() else "")

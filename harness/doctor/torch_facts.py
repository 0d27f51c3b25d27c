"""A program: imports torch and prints what it is, one JSON object a line, so that a query that hangs or crashes leaves
what was known before. Stands alone: it runs in a process of its own, which may end in any way.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def loaded_libraries() -> dict[str, str]:
    """File name up to `.so` -> path of each shared library in this process; empty where the system does not tell."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return {}
    paths = re.findall(r"\s(/\S.*\.so\S*)$", maps.read_text(), re.MULTILINE)
    return {Path(path).name.partition(".so")[0]: path for path in paths}


def nccl_version(library: str) -> str | None:
    """Of the library in this process, which LD_PRELOAD or LD_LIBRARY_PATH can make another than torch's own."""
    number = ctypes.c_int()
    if ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number)) != 0:
        return None
    base = 10_000 if number.value >= 10_000 else 1_000  # 2.9 changed the encoding (nccl.h: NCCL_VERSION)
    major, rest = divmod(number.value, base)
    return f"{major}.{rest // 100}.{rest % 100}"


def main() -> int:
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import torch
            import torch.cuda.nccl
            import torch.distributed as dist
    except (ImportError, OSError) as error:  # OSError: a library it links is missing or of another version
        say(error=f"{type(error).__name__}: {error}".splitlines()[0])
        return 0

    libraries = loaded_libraries()
    available = dist.is_available()
    has_nccl = available and dist.is_nccl_available()
    say(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        file=torch.__file__,
        gloo=available and dist.is_gloo_available(),
        nccl=has_nccl and torch.version.cuda is not None,
        nccl_built=".".join(map(str, torch.cuda.nccl.version()[:3])) if has_nccl else None,
        nccl_loaded=nccl_version(libraries["libnccl"]) if "libnccl" in libraries else None,
        libraries=libraries,
        warnings=[str(warning.message).splitlines()[0] for warning in caught],
    )
    if torch.version.cuda is None:
        return 0

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
        say(
            cuda_devices=torch.cuda.device_count() if usable else 0,
            architectures=torch.cuda.get_arch_list() if usable else [],
            cuda_reason=next((str(warning.message).splitlines()[0] for warning in caught), None),
        )
    say(cudnn=torch.backends.cudnn.version())  # last: it raises where the loaded cuDNN is not the one built against
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Hook implementations of this plug-in: the `gguf` loader and what it asks of the machine.

Imports nothing heavy: `tokenizers`, `gguf` and `jinja2` come with the factory's call.
"""

from __future__ import annotations

from swactor_core.checks import CheckResult, CheckStatus, DoctorCheck
from swactor_core.hookspecs import hookimpl
from swactor_core.spi.loader import Loader, ModelCache
from swactor_core.spi.provider import Kind, Provider
from swactor_core.spi.storage import Storage


def create_loader() -> Loader:
    """The loader of GGUF files."""
    from swactor_loader_gguf.loader import GgufLoader

    return GgufLoader()


def open_cache() -> ModelCache:
    """What the loader keeps on this machine's disk."""
    from swactor_loader_gguf.cached import GgufCache

    return GgufCache()


def open_temporaries() -> Storage:
    """What fetches that were killed have left on it."""
    from swactor_loader_gguf.temporaries import Temporaries

    return Temporaries()


@hookimpl
def swactor_register_loaders() -> list[Provider]:
    return [
        Provider(
            Kind.LOADER,
            "gguf",
            "GGUF files: index, ranges, tokenizer, chat template",
            create_loader,
            cache=open_cache,
            storage=open_temporaries,
        )
    ]


def _check_tokenizers() -> CheckResult:
    try:
        import tokenizers
    except Exception as error:  # a broken native module may raise anything
        return CheckResult(
            CheckStatus.FAIL,
            f"tokenizers cannot be imported: {error}",
            "pip install --force-reinstall tokenizers",
        )
    return CheckResult(CheckStatus.OK, f"tokenizers {tokenizers.__version__}")


def _check_cache() -> CheckResult:
    from swactor_core.config import offline
    from swactor_core.errors import ConfigError, ModelError

    from swactor_loader_gguf.cache import free_bytes, prepare_cache
    from swactor_loader_gguf.packages import DEMO_BYTES

    try:
        folder, forbidden = prepare_cache(), offline()
    except (ModelError, ConfigError) as error:
        return CheckResult(CheckStatus.FAIL, error.message, error.hint)
    free = free_bytes(folder)
    models = open_cache().models()
    taken = sum(model.nbytes for model in models)
    detail = f"{folder}: {len(models)} models, {taken // 2**20} MiB; {free // 2**20} MiB free"
    if forbidden:
        detail += f"; {forbidden} is set: nothing is fetched"
    if free < 3 * DEMO_BYTES:
        return CheckResult(
            CheckStatus.WARN,
            detail,
            "free some space (`swactor-cli cache clear`), or set SWACTOR_CACHE_DIR to another disk",
        )
    return CheckResult(CheckStatus.OK, detail)


@hookimpl
def swactor_doctor_checks() -> list[DoctorCheck]:
    return [
        DoctorCheck("gguf.tokenizers", "the tokenizers library loads", _check_tokenizers),
        DoctorCheck("gguf.cache", "the model cache is writable and has room", _check_cache),
    ]

"""pdcompile: an ordinary PyTorch model and your machines in, the fastest pipeline out."""

from pathlib import Path as _Path

if not (_Path(__file__).parent / "passes").is_dir():
    raise ImportError(
        "pdcompile/passes is not a folder: the checkout lost its symbolic links; "
        "clone again with: git clone -c core.symlinks=true <url>"
    )

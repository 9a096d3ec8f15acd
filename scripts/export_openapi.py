"""Write openapi/openapi.json; with --check only say whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson

from app.api import contract

FILE = Path(__file__).parent.parent / "openapi" / "openapi.json"


def exported() -> bytes:
    """The file as it should be."""
    return orjson.dumps(contract(), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS) + b"\n"


def main() -> int:
    """0 when the file is, or now is, up to date."""
    if "--check" in sys.argv:
        return 0 if FILE.read_bytes() == exported() else 1
    FILE.write_bytes(exported())
    print(FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())

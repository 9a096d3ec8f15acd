"""Write docs/settings.md from the table of settings; with --check only say whether it is stale."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from app.config import NOT_YET  # noqa: E402 (runs from a clone, too)
from app.settings import SETTINGS, Setting  # noqa: E402

PAGE = ROOT / "docs" / "settings.md"
HEAD = """\
# Settings

Made from `app/settings.py` by `python scripts/settings_page.py`; a test fails when it is stale.

A setting is given as a flag of `stagelight serve`, as a variable of the environment, or as a key
of the TOML file that `--config` (or `STAGELIGHT_CONFIG`) names. The first of these that says
something wins: flag, environment, file, default. All are read once, before the port is bound.

```toml
# stagelight.toml
model = "glimmer"
port = 8080
max_sequences = 16
clamp = true
```

* A key of the file may be spelt with `_` or `-`. Switches are `on` and `off`, or a TOML boolean.
* A list is `[0, 1, 5]` in the file and `0,1,5` elsewhere. An empty text is the same as none.
* An unknown name and a value that is not legal end the boot with code 2 and one line.
* A cluster whose service is called `stagelight` sets variables such as `STAGELIGHT_PORT=tcp://...`
  for each of its pods; these are not settings and are left alone.
* MODEL is the argument of `serve`, else `STAGELIGHT_MODEL`, else the key `model`, else `glimmer`.
"""


def row(setting: Setting) -> str:
    legal = setting.kind.legal.replace("|", "\\|")
    default = f"`{setting.default}`" if setting.default else setting.otherwise
    missing = [r for r in NOT_YET if r.setting == setting.name]
    note = f" Not in this version: {'; '.join(r.what for r in missing)}." if missing else ""
    return f"| `{setting.name}` | {setting.meaning}{note} | {legal} | {default} |"


def table(settings: Iterable[Setting]) -> str:
    head = "| name | meaning | legal values | default |\n| --- | --- | --- | --- |\n"
    return head + "\n".join(row(setting) for setting in settings) + "\n"


def page() -> str:
    """The whole page."""
    flags = table(setting for setting in SETTINGS if setting.is_flag)
    keys = table(setting for setting in SETTINGS if not setting.is_flag)
    return (
        f"{HEAD}\n## Flags\n\n`max-context` is the flag `--max-context`, the variable "
        f"`STAGELIGHT_MAX_CONTEXT` and the key `max_context`.\n\n{flags}\n"
        f"## Keys without a flag\n\nThe same, in the environment and in the file only.\n\n{keys}"
    )


def main() -> int:
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE.relative_to(ROOT)} is stale; run python scripts/settings_page.py")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())

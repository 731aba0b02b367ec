"""Files of the site beside the pages of this folder: those of the root, examples, the command line.

mkdocs calls the functions that begin with ``on_``.  Links are written as they work in the
repository, and become links between pages here; one that leads nowhere ends the build.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {  # of the root -> on the site
    "README.md": "readme.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
EXAMPLES = "examples.md"
COMMANDS = "<!-- commands -->"
OPTIONS = "<!-- options -->"
_LINK = re.compile(r"(?<!`)\]\(([^)\s]+)\)")
_BOLD = re.compile(r"\[bold\](.*?)\[/\]")
_EXAMPLE = re.compile(r"(?<=\n\n)(?:  \S.*\n)+")  # the text of a verb indents them by two spaces
_FENCED = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, EXAMPLES, content=examples()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    uri = page.file.src_uri
    source = {site: root for root, site in PAGES.items()}.get(uri, f"docs/{uri}")
    text = markdown.replace(COMMANDS, commands()) if COMMANDS in markdown else markdown
    text = text.replace(OPTIONS, options()) if OPTIONS in text else text
    prose = _FENCED.split(text)  # every other part is a block of code
    prose[::2] = [
        _LINK.sub(lambda found: f"]({linked(found.group(1), source, uri)})", part)
        for part in prose[::2]
    ]
    return "".join(prose)


def linked(link: str, source: str, uri: str) -> str:
    """A link of the file `source` of the repository, as page `uri` of the site has it."""
    path, hash_, anchor = link.partition("#")
    if "://" in link or not path:
        return link
    target = normpath(PurePosixPath(source).parent / path)
    if not (ROOT / target).exists():
        raise PluginError(f"{source} links {link}, which does not exist")
    if target.startswith("examples/"):
        target, hash_, anchor = EXAMPLES, "#", Path(target).stem
    elif target in PAGES:
        target = PAGES[target]
    elif target.startswith("docs/"):
        target = target.removeprefix("docs/")
    else:
        raise PluginError(f"{source} links {link}, which is no page of the site")
    return relpath(target, PurePosixPath(uri).parent) + hash_ + anchor


def examples() -> str:
    """A page of all examples, as they are, with what each is about first."""
    parts = ["# Examples", "", "Each runs as it is, in one process and under torchrun.", ""]
    paths = sorted((ROOT / "examples").glob("*.*"))
    for path in paths:
        title = path.read_text(encoding="utf-8").partition('"""')[2].partition("\n")[0]
        parts += [f"- [{path.name}](#{path.stem}): {title}"] if path.suffix == ".py" else []
    for path in paths:
        language = "python" if path.suffix == ".py" else "text"
        code = path.read_text(encoding="utf-8")
        heading = f"## examples/{path.name} {{: #{path.stem} }}"
        parts += ["", heading, "", f"```{language}", code.rstrip(), "```"]
    return "\n".join(parts) + "\n"


def commands() -> str:
    """Every verb, with its text and its options, as typer writes them."""
    import typer
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    import pdcompile.__main__  # adds the verbs
    from pdcompile.cli.app import app

    assert pdcompile.__main__
    command = get_command(app)
    page = get_docs_for_click(obj=command, ctx=typer.Context(command), name="pdcompile")
    page = _BOLD.sub(r"`\1`", page.partition("\n")[2].replace("$ pdcompile", "pdcompile"))
    for name, verb in getattr(command, "commands", {}).items():
        first = (verb.help or "").partition("\n\n")[0]  # typer cuts it after a few words
        page = re.sub(rf"^(\* `{name}`: ).*", rf"\g<1>{first}", page, flags=re.MULTILINE)
    return _EXAMPLE.sub(_as_block, page)


def options() -> str:
    """The options of `compile`, and the flag of each."""
    from pdcompile.options.table import PANELS, ROWS

    parts = []
    for panel in PANELS:
        parts += [f"### {panel}", ""]
        for row in ROWS.values():
            flag = f" (`{row.written}`)" if row.flag is not None else ""
            if row.panel == panel:
                parts.append(f"- `{row.name}`{flag}: {row.help} {row.more}".rstrip())
        parts.append("")
    return "\n".join(parts)


def _as_block(found: re.Match[str]) -> str:
    return "    " + " \\\n      ".join(line.strip() for line in found[0].splitlines()) + "\n"

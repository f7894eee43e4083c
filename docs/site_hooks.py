"""What the site has beside the pages of docs/: see docs/testing.md.

A page may link to any file of the repository, as on GitHub. The site then has that file as a page
(texts, scripts, notebooks) or as it is (pictures). The README is its first page, the reference is
made of the names that the packages export and of the commands.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

import cost_models
import placer
import solvers
from cli import main

REPOSITORY = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)(?P<path>[^)#\s]+)")
_FENCE = re.compile(
    r"^```(?P<language>\w+) (?P<title>title=\"[^\"]+\")? *no-run: (?P<why>.+)$", re.M
)
_NEEDS = re.compile(r"(?:needs|takes|measures|trains|installs|searches|a part of) [^,\"]+")
"""Of why tests do not run a block, what a reader wants to know before running it."""

_SET_UP = re.compile(r"^<!-- set-up: \w+\n.*?^-->\n", re.M | re.S)
_PICTURES = (".png", ".svg")
_PACKAGES = {"placer": placer, "solvers": solvers, "cost_models": cost_models}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name headings as GitHub does, so that links to them hold in both places."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, and every file outside docs/ that a page leads to."""
    texts = {"reference/commands.md": _commands()}
    texts |= {f"reference/{name}.md": _api(name) for name in _PACKAGES}
    for uri, text in texts.items():
        files.append(File.generated(config, uri, content=text))
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    waiting = ["README.md", *(page for page in pages if (REPOSITORY / page).is_file())]
    seen = set(waiting)
    files.append(_generated("README.md", config))
    while waiting:
        for path in _led_to(waiting.pop()):
            if path not in seen and not path.startswith("docs/"):
                seen.add(path)
                waiting.append(path)
                files.append(_generated(path, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where the site has their files, and say what a block needs of a reader."""
    source = _repository_path(page.file.src_uri)
    if source is not None:
        markdown = _LINK.sub(lambda link: _led(link["path"], source, page.file.src_uri), markdown)
    return _FENCE.sub(_titled, _SET_UP.sub("", markdown))


def _titled(fence: re.Match[str]) -> str:
    needs = _NEEDS.match(fence["why"])
    title = fence["title"] or ("" if needs is None else f'title="{needs[0]}"')
    return f"```{fence['language']} {title}".rstrip()


def _commands() -> str:
    """A page of what `--help` prints."""
    group = click.Context(main, info_name="placer", terminal_width=88, **main.context_settings)
    parts = [f"# Every option\n\n```text\n{main.get_help(group)}\n```\n"]
    for name, command in sorted(main.commands.items()):
        context = click.Context(command, parent=group, info_name=name)
        parts.append(f"## {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


def _api(name: str) -> str:
    """A page of all names that a package exports."""
    names = [one for one in _PACKAGES[name].__all__ if not one.startswith("__")]
    return f"# {name}\n\n" + "\n\n".join(f"::: {name}.{one}" for one in names) + "\n"


def _site_uri(path: str) -> str:
    """Where the site has a file of the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    plain = path.endswith((".md", *_PICTURES))
    return f"files/{path}" if plain else f"files/{path}.md"


def _repository_path(uri: str) -> str | None:
    """The file of the repository that a page of the site shows, if it is Markdown."""
    if uri == "index.md":
        return "README.md"
    path = uri.removeprefix("files/") if uri.startswith("files/") else f"docs/{uri}"
    return path if (REPOSITORY / path).is_file() else None


def _target(link: str, source: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _led_to(path: str) -> Iterator[str]:
    """Files of the repository that a Markdown file links to."""
    if path.endswith(".md"):
        for link in _LINK.finditer((REPOSITORY / path).read_text(encoding="utf-8")):
            target = _target(link["path"], path)
            if (REPOSITORY / target).is_file():
                yield target


def _led(link: str, source: str, uri: str) -> str:
    """A link as the site has it; one to nothing stays as it is, and the strict build refuses it."""
    target = _target(link, source)
    if not (REPOSITORY / target).is_file():
        return link
    return posixpath.relpath(_site_uri(target), posixpath.dirname(uri) or ".")


def _generated(path: str, config: MkDocsConfig) -> File:
    """A file of the repository for the site."""
    source, uri = REPOSITORY / path, _site_uri(path)
    if path.endswith((".md", *_PICTURES)):
        return File.generated(config, uri, abs_src_path=str(source))
    text = source.read_text(encoding="utf-8")
    shown = _notebook(text) if source.suffix == ".ipynb" else _script(path, text)
    return File.generated(config, uri, content=shown)


def _script(path: str, text: str) -> str:
    language = {".py": "python", ".yaml": "yaml"}.get(PurePosixPath(path).suffix, "text")
    return f'# {PurePosixPath(path).name}\n\n````{language} title="{path}"\n{text}````\n'


def _notebook(text: str) -> str:
    """The cells of a notebook, and what they print."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        parts.append(f"````python\n{source}\n````" if is_code else source)
        for output in cell.get("outputs", []):
            shown = output.get("text") or output.get("data", {}).get("text/plain", "")
            parts.append(f"````text\n{''.join(shown)}\n````")
    return "\n\n".join(parts) + "\n"

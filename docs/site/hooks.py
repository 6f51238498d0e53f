"""The site of `make docs`: pages that are made from other files, and links that leave `docs/`."""

import posixpath
import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!\w+:|/|#)([^)\s#]+)")
ITEM, ROW, FENCE = r" *([-*]|\d+\.) ", r"\|", "```"


def on_files(files, config):
    """Adds the start page, changes, examples and the API reference (`extra.api` of mkdocs.yml)."""
    made = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
    pages = {uri: linked((ROOT / name).read_text(), "", config) for uri, name in made.items()}
    for name, title in config.extra["examples"].items():
        source = (ROOT / "examples" / f"{name}.py").read_text()
        pages[f"examples/{name}.md"] = (
            f"# {title}\n\n`examples/{name}.py`:\n\n```python\n{source}```\n"
        )
    for name, (title, package, members) in config.extra["api"].items():
        entries = "\n\n".join(f"::: {package}.{member}" for member in members.split())
        pages[f"api/{name}.md"] = f"# {title}\n\n{entries}\n"
    pages["assets/site.css"] = Path(__file__).with_name("site.css").read_text()
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    if page.file.generated_by is None:
        markdown = linked(markdown, f"docs/{posixpath.dirname(page.file.src_uri)}", config)
    return spaced(markdown)


def on_page_content(html, page, **_):
    """Links of tutorials, which are notebooks: MkDocs rewrites only those of Markdown."""
    if not page.file.src_uri.startswith("tutorials/"):
        return html
    return re.sub(r'href="\.\./(\w+)\.md', r'href="../../\1/', html)


def linked(text: str, folder: str, config) -> str:
    """Links that leave `docs/` lead to the sources; `folder`: of the page, in the checkout."""

    def link(match):
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        if not path.startswith("docs/"):
            return f"]({config.extra['source_url']}/{path}"
        return match[0] if folder else f"]({path.removeprefix('docs/')}"

    return LINK.sub(link, text)


def spaced(text: str) -> str:
    """Blank lines before lists and tables, which GitHub does not need but Markdown does."""
    out, inside = [], False
    for line in text.splitlines():
        before = out[-1] if out else ""
        begins = any(re.match(x, line) and not re.match(x, before) for x in (ITEM, ROW, FENCE))
        if not inside and begins and before.strip() and not before.startswith("  "):
            out.append("")
        inside ^= line.lstrip().startswith(FENCE)
        out.append(line)
        if line == FENCE and not inside:
            out.append("")
    return "\n".join(out) + "\n"


class Groups(griffe.Extension):
    """Entries of several arguments, `key, value: text`, become one entry for each; a section on
    the line of its name becomes a paragraph."""

    def on_object(self, *, obj, **_):
        if obj.docstring is not None:
            text = re.sub(
                r"^( *)(Args|Returns|Raises): (?=\S)",
                r"\1**\2**: ",
                obj.docstring.value,
                flags=re.M,
            )
            entry = r"^( {2,6})(\*{0,2}\w+(?:, \*{0,2}\w+)+)(:.*\n(?:\1 +.*\n?)*)"
            obj.docstring.value = re.sub(entry, self.apart, f"{text}\n", flags=re.M)

    @staticmethod
    def apart(match):
        names = match[2].split(", ")
        return "".join(f"{match[1]}{name}{match[3].rstrip()}\n" for name in names)

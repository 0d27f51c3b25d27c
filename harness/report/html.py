"""The report as one HTML file that needs nothing else: no script, no request, light and dark, on paper too."""

from __future__ import annotations

from importlib.resources import files

from harness import __version__
from harness.report import pipeline, sections
from harness.report.build import Report
from harness.report.markup import Html, joined, listing, tag

# Nothing is loaded and nothing runs, whatever a name in a trace says. Pictures are inline, with inline styles.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(report: Report) -> str:
    """The whole document. Sections without input are left out and named at the end."""
    shown = [(section, content) for section in sections.SECTIONS if (content := section.body(report))]
    missing = [section for section in sections.SECTIONS if section not in [s for s, _ in shown]]
    body = [(section.anchor, section.title, content) for section, content in shown]
    if report.pipeline is not None:
        lines = pipeline.render(report.pipeline)
        body.append(("pipeline", "Pipeline", [tag("pre", *(joined(line, Html("\n")) for line in lines))]))
    return document(
        title=sections.title(report),
        header=sections.head(report),
        body=body,
        left_out=_left_out(report, missing),
        footer=[sections.definitions(), tag("p", f"Written by meshscope {__version__}; figures as in report --json.")],
    )


def document(
    *, title: str, header: list[Html], body: list[tuple[str, str, list[Html]]], left_out: Html, footer: list[Html]
) -> str:
    """A page with this project's looks from finished parts; `body` are its sections: anchor, title, content."""
    style = Html(files("harness.report").joinpath("page.css").read_text(encoding="utf-8"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · meshscope"),
        tag("style", style),
    )
    links = [tag("a", name, href=f"#{anchor}") for anchor, name, _ in body]
    sections_ = [tag("section", tag("h2", name), *content, id=anchor) for anchor, name, content in body]
    whole = tag(
        "body",
        tag("header", *header, tag("nav", *links, aria_label="Sections")),
        tag("main", *sections_, left_out),
        tag("footer", *footer),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, whole, lang='en')}\n"


def _left_out(report: Report, missing: list[sections.Section]) -> Html:
    """What this report does not say, and why."""
    unread = [f"{error.file}: {error.reason}" for error in report.errors]
    if not (missing or unread):
        return Html("")
    parts = [tag("h2", "Not in this report")]
    parts += [listing([f"{section.title}: {section.why_empty(report)}" for section in missing])] if missing else []
    parts += [tag("h3", "Missing or unreadable input"), listing(unread, class_="path")] if unread else []
    return tag("section", joined(*parts), id="left-out")

"""Text and code of the documents."""

import re


def section(page: str, title: str) -> str:
    """What stands below a heading, such as `### Resuming`, up to the next of its level or above."""
    marks, _, _ = title.partition(" ")
    _, found, rest = page.partition(f"{title}\n")
    end = rf"^#{{2,{len(marks)}}} "
    assert found, title
    return re.split(end, rest, maxsplit=1, flags=re.MULTILINE)[0]


def codes(text: str, language: str = "python") -> list[str]:
    """The codes of a language in a text."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)

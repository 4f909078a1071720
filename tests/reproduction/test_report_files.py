"""The files of the report, parsed back, and the report command."""

import base64
import csv
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from reproduction.reporting.cells import read_cells
from reproduction.reporting.collect import report_folder
from reproduction.reporting.pictures import draw_pictures
from reproduction.reporting.render import (
    as_csv,
    as_json,
    as_latex,
    as_markdown,
    write_page,
)
from reproduction.reporting.tables import Table
from reproduction.studies import overview
from reproduction.studies.overview import build_tables
from reproduction.studies.plan import Settings, point_configs
from reproduction.system.errors import UserError
from scripts import report
from tests.reproduction.tables import (
    COUNTS,
    Configs,
    all_tables,
    rising,
    shortened,
    sources_of,
    tables_of,
    write_metrics,
    write_run,
)

HTM, GRADIENT = "table1/cifar100_htm", "table3/gradient"
HOSTILE = '<script>alert(1)</script> a|b & 100% $x_1^2~ {y} \\input "q" [z] # *i* `c`'


Files = dict[str, Path]  # of a report, by name


def write_runs(folder: Path, configs: Configs) -> Path:
    """Writes two seeds of HTM, one of tau=0, a failed run with hostile texts, a hostile folder."""
    folder.mkdir()
    for seed in (0, 1):
        run = write_run(folder, configs[HTM], seed, name=f"htm & {seed}", hardware=HOSTILE)
        write_metrics(run / "metrics.jsonl", rising(40))
    write_run(folder, configs["tau=0"], 0, name="tau", top1=79.25)
    write_run(folder, configs[GRADIENT], 5, name="<i>'\"?#", status="failed", error=HOSTILE)
    (folder / "<b>foreign").mkdir()
    return folder


@pytest.fixture
def outputs(tmp_path: Path, configs: Configs) -> Path:
    return write_runs(tmp_path / "outputs", configs)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, configs: Configs) -> Files:
    """The report of these runs; drawing it takes seconds."""
    outputs = write_runs(tmp_path_factory.mktemp("shared") / "outputs", configs)
    return write_report(outputs, configs)


class Tags(HTMLParser):
    """Collects tags, attributes and text, and checks that tags are closed."""

    VOID = ("meta", "img")

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def write_report(outputs: Path, configs: Configs, scale: str = "full") -> Files:
    sources = sources_of(outputs, configs, scale)
    folder = report_folder(outputs)
    tables = build_tables(sources)
    pictures = draw_pictures(sources, tables, folder)
    files = write_page(folder, tables, pictures, sources.collection)
    return {path.name: path for path in files}


def shown(table: Table, is_printed: bool = False) -> list[list[str]]:
    """Returns the texts of each row."""
    columns = [column for column in table.columns if column.is_printed or not is_printed]
    lines = [record for _, records in table.sections() for record in records]
    return [[column.text(record) for column in columns] for record in lines]


def numbers(text: str) -> list[str]:
    for sign, plain in (("$-$", "-"), (r"$\pm$", " "), ("+/-", " "), ("\xb1", " ")):
        text = text.replace(sign, plain)
    return re.findall(r"[-+]?\d+(?:[.,]\d+)*(?:e-\d+)?", text)


def in_numbers(rows: list[list[str]]) -> list[list[list[str]]]:
    return [[numbers(text) for text in row] for row in rows]


def test_formats_show_the_same_numbers(outputs: Path, configs: Configs, files: Files):
    page = Tags(files["index.html"].read_text()).rows
    for table in all_tables(outputs, configs):
        lines = as_markdown(table).splitlines()
        heads = ("---", "---:", table.columns[0].title)
        cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("|")]
        rows = [row for row in cells if row[0].strip() not in heads]
        assert in_numbers(rows) == in_numbers(shown(table))
        lines = [line for line in as_latex(table).splitlines() if line.endswith(r" \\")]
        rows = [re.split(r"(?<!\\)&", line) for line in lines if "multicolumn" not in line][1:]
        assert in_numbers(rows) == in_numbers(shown(table, is_printed=True))
        for row in shown(table):
            assert [text.replace("+/-", "\xb1") for text in row] in page


def test_texts_are_the_rounded_numbers_of_the_json(outputs: Path, configs: Configs):
    values = 0
    for table in all_tables(outputs, configs):
        titles = [column.title for column in table.columns]
        for entry, row in zip(json.loads(as_json(table))["records"], shown(table), strict=True):
            text = dict(zip(titles, row, strict=True))
            for kind in ("last", "median10", "best"):
                mean, std = (entry[f"top1_{kind}_{part}"] for part in ("mean", "std"))
                spread = "-" if mean is None else f"{mean:.2f}"
                spread += "" if std is None else f" +/- {std:.2f}"
                assert text[f"top-1 {kind.removesuffix('10')}"] == spread
                values += mean is not None
            printed = entry["paper_top1"]
            assert text["top-1 paper"] == ("-" if printed is None else f"{printed:.2f}")
    assert values == 3 * 7  # four cells, tau=2 and rho=0.005 share HTM's runs; and tau=0


def test_json_and_csv_hold_the_same_numbers(outputs: Path, configs: Configs):
    for table in all_tables(outputs, configs):
        content = json.loads(as_json(table))
        rows = list(csv.DictReader(io.StringIO(as_csv(table))))
        assert content["scale"] == "full" and content["warning"] is None
        assert len(rows) == len(content["records"]) == len(table.records)
        for row, entry in zip(rows, content["records"], strict=True):
            assert list(row) == list(entry)
            for key, value in entry.items():
                text = ";".join(map(str, value)) if isinstance(value, list) else str(value)
                assert row[key] == ("" if value is None else text), key


def test_json_holds_unrounded_results(outputs: Path, configs: Configs):
    records = json.loads(as_json(tables_of(outputs, configs)[0][4]))["records"]
    (full,) = [entry for entry in records if entry["experiment"] == "table4/full"]
    assert (full["n"], full["seeds"], full["runs"]) == (2, [0, 1], ["htm & 0", "htm & 1"])
    assert full["top1_last_mean"] == 80.5 and full["top1_best_mean"] == 81.0
    assert full["top1_last_std"] == pytest.approx(0.5**0.5)
    assert full["top1_last_minus_paper"] == pytest.approx(80.5 - 83.56)
    assert full["top1_best_minus_paper"] == pytest.approx(81.0 - 83.56)
    assert full["git_revisions"] == ["ab" * 20] and full["seconds_mean"] == 7200


def test_latex_is_a_booktabs_table_with_equal_rows(outputs: Path, configs: Configs):
    for table in all_tables(outputs, configs):
        text = as_latex(table)
        (layout,) = re.findall(r"\\begin\{tabular\}\{([lr]+)\}", text)
        rows = [line for line in text.splitlines() if line.endswith(r" \\")]
        widths = {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows if "multicolumn" not in row}
        assert widths == {len(layout)}
        assert all(f"\\{rule}rule" in text for rule in ("top", "mid", "bottom"))
        bare = re.sub(r"\\.", "", text)
        assert bare.count("{") == bare.count("}")


def test_latex_escapes_special_characters(outputs: Path, configs: Configs):
    text = as_latex(tables_of(outputs, configs)[0][3])
    (note,) = [line for line in text.splitlines() if line.startswith("Not counted")]
    assert r"a\textbar{}b \& 100\% \$x\_1\textasciicircum{}2\textasciitilde{} \{y\}" in note
    assert r"\textbackslash{}input" in note and r"\#" in note and "<" not in note
    assert r"80.50 $\pm$ 0.71" in text and r"$-$3.06" in text


def test_markdown_rows_have_equal_widths_and_are_escaped(outputs: Path, configs: Configs):
    for number, table in tables_of(outputs, configs)[0].items():
        text = as_markdown(table)
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {len(table.columns) + 1}
        assert "<script>" not in text
        assert (r"&lt;script&gt;alert(1)&lt;/script&gt; a\|b &amp; 100%" in text) == (number == 3)


def test_all_files_of_a_small_scale_have_a_warning(outputs: Path, configs: Configs):
    short = shortened(configs)
    write_run(outputs, short[HTM], name="short")
    tables = all_tables(outputs, short, "smoke")
    for table in tables:
        for render in (as_markdown, as_latex):
            text = render(table)
            assert "at smoke scale" in text and "WARNING. SMOKE SCALE" in text.replace("*", "")
        assert "SMOKE SCALE" in json.loads(as_json(table))["warning"]
        for row in csv.DictReader(io.StringIO(as_csv(table))):
            assert row["scale"] == "smoke" and "SMOKE SCALE" in row["warning"]
    page = write_report(outputs, short, "smoke")["index.html"].read_text()
    assert page.count("WARNING. SMOKE SCALE") == 1 + len(tables)  # at the top and at each table


def test_only_full_scale_is_compared_with_the_paper(outputs: Path, configs: Configs):
    short = shortened(configs)
    write_run(outputs, short[HTM], name="short")
    for scale, chosen, compared in (("full", configs, True), ("short", short, False)):
        table = tables_of(outputs, chosen, scale)[0][4]
        assert any("- paper" in column.title for column in table.columns) == compared
        (full, *_) = json.loads(as_json(table))["records"]
        assert full["n"] > 0 and full["paper_top1"] == 83.56
        assert (full["top1_last_minus_paper"] is not None) == compared


def test_tables_without_cells_at_the_scale_are_omitted(outputs: Path, configs: Configs):
    own = {name: config for name, config in configs.items() if "imagenet1k" not in name}
    names = [table.name for table in all_tables(outputs, own)]
    assert names[:4] == ["table1", "table3", "table4", "table5"]


def test_page_of_full_scale_has_no_warning(files: Files):
    assert "WARNING" not in files["index.html"].read_text()


def test_page_is_complete_and_self_contained(outputs: Path, configs: Configs, files: Files):
    page = files["index.html"].read_text()
    tags = Tags(page)
    tables = all_tables(outputs, configs)
    assert len(tables) == 8
    for table in tables:
        assert ("section", {"id": table.name}) in tags.tags
        assert table.title in tags.text
    for name in ("figure3", "mixed_pairs", "figure4"):
        assert ("section", {"id": name}) in tags.tags
    for cell in read_cells():
        assert cell.row in tags.text
    names = {tag for tag, _ in tags.tags}
    assert not names & {"script", "link", "iframe", "object", "i", "b"}
    outside = re.sub(r'src="data:image/png;base64,[\w+/=]+"', "", page)
    assert not re.search(r"https?:|url\(|@import|//[a-z]|src=", outside)
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page
    wrapped = [attributes for tag, attributes in tags.tags if attributes.get("class") == "scroll"]
    assert len(wrapped) == sum(tag == "table" for tag, _ in tags.tags) == 10
    assert not any(key.startswith("on") for _, attrs in tags.tags for key in attrs)


def test_page_embeds_the_figure_files(files: Files):
    images = [attrs for tag, attrs in Tags(files["index.html"].read_text()).tags if tag == "img"]
    drawn = {name for name in files if name.endswith(".png")}
    assert drawn == {"sweep-tau.png", "sweep-rho.png", "figure4.png"}
    contents = {base64.b64decode(str(image["src"]).partition(",")[2]) for image in images}
    assert contents == {files[name].read_bytes() for name in drawn}
    for image in images:
        assert len(str(image["alt"])) > 40
        with Image.open(io.BytesIO(base64.b64decode(str(image["src"]).partition(",")[2]))) as file:
            assert (str(file.width), str(file.height)) == (image["width"], image["height"])


def test_reports_are_reproducible(outputs: Path, configs: Configs, files: Files):
    again = write_report(outputs, configs)
    assert list(again) == list(files)
    assert [name for name in files if files[name].read_bytes() != again[name].read_bytes()] == []


def test_page_escapes_hostile_text(files: Files):
    tags = Tags(files["index.html"].read_text())
    assert HOSTILE in tags.text and "<b>foreign" in tags.text and "<i>'\"?#" in tags.text
    links = [attrs["href"] for tag, attrs in tags.tags if tag == "a"]
    assert "../htm%20%26%200/" in links and "../%3Ci%3E%27%22%3F%23/" in links
    anchors = {f"#{attrs['id']}" for _, attrs in tags.tags if "id" in attrs}
    assert {link for link in links if link and link.startswith("#")} == anchors


def test_links_of_the_page_resolve(files: Files, configs: Configs):
    page = files["index.html"].read_text()
    links = {attrs["href"] for tag, attrs in Tags(page).tags if tag == "a"}
    assert len(files) == 8 * 4 + 3 * 2 + 1 and all(file.is_file() for file in files.values())
    assert set(files) - {"index.html"} == {x for x in links if x and x[0] not in "#."}
    collection = sources_of(files["index.html"].parents[1], configs).collection
    assert "report" not in {entry.folder for entry in collection.unused}


def test_report_refuses_a_run_named_report(outputs: Path, configs: Configs):
    write_run(outputs, configs[HTM], 7, name="report")
    assert "report" in [run.folder for run in sources_of(outputs, configs).collection.runs()]
    with pytest.raises(UserError, match="is the folder of a run"):
        write_report(outputs, configs)
    assert not (outputs / "report" / "index.html").exists()


def test_command_prints_the_files_that_it_writes(outputs, configs, monkeypatch, capsys):
    monkeypatch.setattr(overview, "point_configs", lambda *args: configs)
    monkeypatch.setattr(overview, "count", lambda papers: COUNTS)
    monkeypatch.setattr(sys, "argv", ["report.py", "--outputs", str(outputs)])
    report.main()
    printed = capsys.readouterr().out.splitlines()
    assert {str(path) for path in (outputs / "report").iterdir()} == set(printed)


def test_smoke_report_reads_smoke_runs_and_lies_beside_them(tmp_path, configs, monkeypatch, capsys):
    smoke = point_configs("table1", Settings(scale="smoke", outputs=str(tmp_path)))
    monkeypatch.setattr(overview, "point_configs", lambda *args: {**configs, **smoke})
    (tmp_path / "smoke").mkdir()
    write_run(tmp_path / "smoke", smoke["table1/cifar10_htm"], 0)
    monkeypatch.setattr(overview, "count", lambda papers: COUNTS)
    argv = ["report.py", "--scale", "smoke", "--outputs", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    report.main()
    assert {Path(line).parent for line in capsys.readouterr().out.splitlines()} == {
        tmp_path / "smoke" / "report"
    }
    text = (tmp_path / "smoke" / "report" / "table1.md").read_text()
    assert "SMOKE SCALE" in text and "1 finished" in text


def test_report_does_not_import_torch():
    code = "import sys, reproduction.studies.overview; print({'torch', 'timm'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"

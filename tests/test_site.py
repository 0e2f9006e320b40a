"""The documentation site: every public name where a user would look, pages of one shape and length, a strict build."""

import importlib
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dissensus as ds

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ROOMS = ("attacks", "bench", "data", "distributed", "landscape", "metrics", "nets", "sklearn", "theory")
SHAPE = ["Idea", "Equation", "Picture", "Code", "Cost", "When not", "Paper"]


def directives() -> list[str]:
    """Public names that the reference pages take from docstrings: `predict` where it says `predict.predict`.

    A function in a file of its name must be written so: the tool that reads the source would show the file instead.
    """
    pages = (DOCS / "reference").rglob("*.md")
    found = [name for page in pages for name in re.findall(r"^::: dissensus\.(\S+)$", page.read_text(), re.MULTILINE)]
    for name in found:
        file = ROOT / "src" / "dissensus" / f"{name.replace('.', '/')}.py"
        assert not file.exists(), f"{name} is a file: write {name}.{name.rpartition('.')[2]}"
    return [re.sub(r"(^|\.)(?:methods\.)?(\w+)\.\2$", r"\1\2", name) for name in found]


def test_every_public_name_is_in_the_reference_once():
    found = directives()
    assert len(found) == len(set(found))
    top = {name for name in found if "." not in name}
    assert top == set(ds.__all__) - {*ROOMS, "integrations"}  # whose modules need other packages
    for room in ROOMS:
        public = importlib.import_module(f"dissensus.{room}").__all__
        mine = sorted(name.rpartition(".")[2] for name in found if name.split(".")[0] == room)
        assert mine == sorted(public), room


def test_every_class_and_verb_of_the_reference_has_an_example():
    """Code, or a link to a page with code, before the next name."""
    for page in ("verbs", "posterior", "methods", "likelihoods", "evaluation", "attacks", "landscape", "distributed"):
        parts = re.split(r"^::: (\S+)$", (DOCS / "reference" / f"{page}.md").read_text(), flags=re.MULTILINE)[1:]
        names, texts = parts[::2], parts[1::2]
        bare = [n for n, text in zip(names, texts, strict=True) if "```python" not in text and "Example" not in text]
        assert bare == []


def test_every_method_has_a_page_of_one_shape_with_its_picture():
    for name in ds.METHODS:
        file = name.replace("_", "-")
        text = (DOCS / "methods" / f"{file}.md").read_text()
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SHAPE, name
        assert f"(../figures/methods/{file}.png)" in text
        assert (DOCS / "figures" / "methods" / f"{file}.png").exists()
        assert f"({file}.md)" in (DOCS / "methods" / "index.md").read_text()


def test_pages_are_no_longer_than_agreed():
    long = {page: len(page.read_text().splitlines()) for page in (DOCS / "guides").glob("*.md")}
    assert {page.name: lines for page, lines in long.items() if lines > 150} == {}
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_results_that_a_choice_links_have_the_methods_it_names():
    """In the rows of docs/choose.md whose reason is a page of results."""
    rows = re.findall(r"^\|[^|]*\|([^|]*)\| \[results\]\((\S+)\) \|$", (DOCS / "choose.md").read_text(), re.MULTILINE)
    assert len(rows) >= 2
    for take, page in rows:
        for method in re.findall(r"\[(\w+)\]\(methods/", take):
            said = (DOCS / page).read_text().lower().replace(" ", "").replace("_", "")
            assert method.lower() in said, f"{page} has no {method}"


def test_pages_link_to_pages_that_are_there():
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
        assert [x for x in links if "://" not in x and not (page.parent / x).exists()] == [], page.name


SEARCHES = {  # what is typed, and the page that must be the first hit
    "tensorboard": "guides/logging",
    "resume": "guides/training",
    "huggingface": "guides/text",
    "calibration": "guides/calibration",
    "conformal": "guides/guarantees",
    "onnx": "guides/deploy",
    "sklearn": "guides/tables",
    "swag": "methods/swag",
    "nodebnn": "methods/node-bnn",
}


@pytest.fixture(scope="module")
def hooks():
    """docs/site.py, which mkdocs calls."""
    spec = importlib.util.spec_from_file_location("docs_site", DOCS / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_words_that_people_search_for_belong_to_one_page(hooks):
    """The theme's search weighs a page's keywords a thousand times as much as titles: one page with the word is the first."""
    pages = {str(page.relative_to(DOCS)): page.read_text() for page in DOCS.rglob("*.md")}
    assert {*hooks.KEYWORDS} <= {*pages}
    titles = {path: re.search("^# (.*)$", text, re.MULTILINE)[1] for path, text in pages.items()}
    words = [(word.lower(), path) for path in pages for word in hooks.keywords(path, titles[path])]
    assert len(dict(words)) == len(words), "a word is on two pages"
    assert {word: dict(words)[word] for word in SEARCHES} == {word: f"{page}.md" for word, page in SEARCHES.items()}


@pytest.mark.parametrize(("source", "phone", "kind"), [
    ("figures/front.png", 'media="(max-width: 45em)" srcset="figures/front-narrow.png"', "figure"),
    ("figures/memory.png", "--width: 770px", "figure"),
    ("figures/corruptions.png", "--width: 1080px", "figure true-colours"),
])  # fmt: skip
def test_figures_have_a_form_for_phones_and_photographs_keep_their_colours(hooks, source, phone, kind):
    made = hooks.figure(f'<img alt="" src="{source}">', source, DOCS)
    assert made.startswith(f'<a class="{kind}" href="{source}">')
    assert phone in made
    assert all((DOCS / name).exists() for name in re.findall(r"figures/[\w-]+\.png", made))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    if not all(importlib.util.find_spec(name) for name in ("mkdocs", "mkdocstrings", "latex2mathml")):
        pytest.skip("mkdocs is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 80
    loads = r'<(?:script|link|img|source|iframe)\b[^>]*\b(?:src|srcset|href)="(?:https?:)?//[^"]*"'
    assert {found for page in pages for found in re.findall(loads, page.read_text())} == set()
    assert "<math" in (site / "methods" / "swag.html").read_text()
    assert 'srcset="figures/front-narrow.png"' in (site / "index.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("word", SEARCHES)
def test_a_search_in_the_site_opened_from_a_folder_finds_its_page_first(site, word):
    if not (browser := shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("no chromium on this machine: it is what runs the search")
    url = f"{(site / 'index.html').as_uri()}?q={word}"
    command = [browser, "--headless", "--no-sandbox", "--virtual-time-budget=15000", "--dump-dom", url]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    hits = re.findall(r'href="([^"?]*)[^"]*" class="md-search-result__link"', shown)
    assert hits[0] == (site / f"{SEARCHES[word]}.html").as_uri()


# --------------------------------------------------------------------------------------------- what the packages offer
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize(
    "name",
    ["dissensus", *(f"dissensus.{room}" for room in ("attacks", "data", "metrics", "nets", "sklearn", "theory"))],
)
def test_every_public_function_is_named_in_the_documentation(name):
    package = importlib.import_module(name)
    words = set(re.findall(r"\w+", "".join(page.read_text() for page in PAGES)))
    functions = [each for each in package.__all__ if inspect.isfunction(getattr(package, each))]
    assert [each for each in functions if each not in words] == []


def test_docstrings_of_verbs_and_methods_open_with_a_sentence_and_name_every_argument():
    """A docstring that says "arguments as in" another one names only those that differ."""
    rooms = (ds, ds.attacks, ds.landscape, ds.distributed)
    offered = [getattr(room, name) for room in rooms for name in room.__all__]
    verbs = [each for each in offered if inspect.isfunction(each)]
    others = [ds.Classification, ds.Regression, ds.GaussianPrior, ds.EmpCov, ds.Annealing]
    for each in [*verbs, *ds.METHODS.values(), *others]:
        text = inspect.getdoc(each) or ""
        first = text.split("\n\n")[0]
        assert first[0].isupper() or first[0] == "(", each
        assert first.endswith("."), each
        given = set(inspect.signature(each).parameters)
        if "rguments as in" not in text:
            assert sorted(name for name in given if not re.search(rf"\b{name}\b", text)) == [], each


def test_a_network_is_an_argument_of_one_name():
    """`network` for exactly one, `networks` where a list may be given; `base` is what the members of an ensemble share."""
    rooms = (ds, *(importlib.import_module(f"dissensus.{room}") for room in ROOMS))
    offered = [getattr(room, name) for room in rooms for name in room.__all__]
    called = [x for x in offered if inspect.isfunction(x) or (isinstance(x, type) and not issubclass(x, Exception))]
    taken = [(each.__name__, {*inspect.signature(each).parameters}) for each in called]
    others = {"base", "model", "models", "module", "modules", "net", "nets"}
    assert {name for name, given in taken if given & others} == {"DeepEnsemble", "StackedPosterior", "load", "save"}
    assert {"watching", "BatchEnsemble", "empirical_ntk"} <= {name for name, given in taken if "network" in given}
    assert [name for name, given in taken if given >= {"network", "networks"}] == []


def test_pages_for_developers_name_files_that_are_there():
    """Paths are written from the root, or from the package."""
    for page in [ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / "developing").glob("*.md")]:
        text = page.read_text()
        paths = re.findall(r"`([\w./]+/[\w.]*)`", text) + re.findall(r"\]\(([\w./-]+)\)", text)
        assert paths or page.name in ("index.md", "groups.md")
        roots = (ROOT, ROOT / "src" / "dissensus", page.parent)
        assert [path for path in paths if not any((root / path).exists() for root in roots)] == [], page.name


def test_a_stranger_finds_where_new_things_go():
    rows = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| ")]
    new = {word for row in rows for word in row.split("|")[1].replace(",", " ").split()}
    assert {"method", "kernel", "metric", "figure", "data", "network", "task", "strategy"} <= new

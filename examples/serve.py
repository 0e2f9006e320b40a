"""A posterior behind HTTP: raw rows in; class, uncertainties, a set of classes and a gate for foreign rows out.

    python examples/serve.py                     # trains, saves, answers one request, prints it
    uvicorn --app-dir examples serve:app         # serves what was saved

The folder holds weights, transforms, promises and class names and no code, so the server builds nothing but the app.
"""

from pathlib import Path

import torch
from fastapi import FastAPI

import dissensus as ds

FOLDER = Path("served")


def train() -> None:
    """Two moons in millimetres: the networks see standardised columns, users never do."""
    torch.manual_seed(0)
    x, y = ds.data.two_moons(400, seed=0)
    rows = 1000 + 40 * x
    scale = ds.data.Standardiser.of_rows(rows[:200])
    posterior = ds.DeepEnsemble([ds.nets.MLP(2, 2, hidden=(16,)) for _ in range(3)])
    ds.fit(posterior, (scale(rows[:200]), y[:200]), epochs=20, progress=False)
    held_out = scale(rows[200:]), y[200:]
    ds.conformal(posterior, held_out, level=0.95)
    ds.ood_gate(posterior, held_out, score="epistemic")
    ds.save(posterior, FOLDER, inputs=scale, classes=["upper", "lower"])


def make_app(folder: Path = FOLDER) -> FastAPI:
    app, posterior = FastAPI(), ds.load(folder)

    @app.post("/predict")
    def predict(rows: list[list[float]]) -> list[dict[str, object]]:
        return ds.decide(posterior, rows).to_dicts()

    return app


def __getattr__(name: str) -> FastAPI:
    if name != "app":
        raise AttributeError(name)
    return make_app()


if __name__ == "__main__":
    from fastapi.testclient import TestClient

    train()
    answer = TestClient(make_app()).post("/predict", json=[[1020.0, 1020.0], [1500.0, 500.0]]).json()
    for row in answer:
        print(
            f"{row['prediction']:8}{row['confidence']:8.3f}{row['epistemic']:8.3f}{len(row['conformal']):4}{row['accept']:4}"
        )

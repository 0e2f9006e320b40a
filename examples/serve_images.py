"""An image service with the standard library: a picture in, JSON out: class, uncertainty, set of classes, and gates.

    python examples/serve_images.py            # trains, exports, answers two requests, prints them
    python examples/serve_images.py --port 8000
    curl --data-binary @digit.png http://localhost:8000

The server reads one exported file: networks, scaling of pixels, set and gates are inside, in one forward pass.
"""

import argparse
import io
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
from PIL import Image

import dissensus as ds

FILE = Path("digits.pt2")


def train_and_export(quick: bool) -> torch.Tensor:
    """Training digits train, half of the test digits promise; the file takes uint8 pixels. Returns another test digit."""
    torch.manual_seed(0)
    train, test = ds.data.digits()
    rows = torch.randperm(len(train.images))[: 1000 if quick else None]
    scale = ds.data.Standardiser.of_channels(train.images)
    posterior = ds.DeepEnsemble([ds.nets.LeNet(10) for _ in range(2)])
    loader = ds.data.Batches(scale(train.images[rows]), train.labels[rows], batch_size=32, shuffle=True)
    ds.fit(posterior, loader, epochs=3, progress=False)
    ds.save(posterior, "digits", inputs=scale)
    posterior = ds.load("digits")  # takes raw pixels
    held = [(test.images[1::2], test.labels[1::2])]
    ds.conformal(posterior, held, level=0.9, never_empty=True)
    ds.selective(posterior, held, risk=0.1)
    ds.ood_gate(posterior, held, false_alarm=0.05)
    ds.export(posterior, FILE, example=test.images[:2])
    return test.images[0, 0]


def make_server(port: int = 0, file: Path = FILE) -> ThreadingHTTPServer:
    """A server on this port; 0 is any free one."""
    predict = torch.export.load(file).module()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                image = Image.open(io.BytesIO(body)).convert("L").resize((28, 28))
                status, answer = 200, describe(predict(torch.from_numpy(np.array(image))[None, None]))
            except (OSError, TypeError) as error:  # no image, or no length
                status, answer = 400, {"error": f"expected the bytes of an image, got {error}; post a PNG or JPEG file"}
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def describe(found: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The outputs of the file for one image, as JSON values; `answer` is None where a gate refuses."""
    mean, gates = found["mean"][0], {name: bool(found[name][0]) for name in ("selective", "ood_gate")}
    told = {"likeliest": int(mean.argmax()), "set": found["conformal"][0].nonzero()[:, 0].tolist(), **gates}
    told |= {name: float(found[name][0]) for name in ("aleatoric", "epistemic")} | {"confidence": float(mean.max())}
    return told | {"answer": told["likeliest"] if all(gates.values()) else None}


def ask(server: ThreadingHTTPServer, image: torch.Tensor) -> dict[str, Any]:
    Image.fromarray(image.numpy()).save(body := io.BytesIO(), "PNG")
    with urlopen(f"http://127.0.0.1:{server.server_port}", body.getvalue()) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--port", type=int, default=0)
    options.add_argument("--quick", action="store_true")
    chosen = options.parse_args()
    digit, server = train_and_export(chosen.quick), make_server(chosen.port)
    Thread(target=server.serve_forever, daemon=not chosen.port).start()
    for name, image in (("digit", digit), ("shoe", ds.data.fashion().images[0, 0])):
        row = ask(server, image)
        print(f"{name:8}{row['set']!s:24}{row['confidence']:8.3f}{row['epistemic']:8.3f}")

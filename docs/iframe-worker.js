// Search from a folder: browsers start no worker on file://, so the theme's search runs in a hidden frame instead.
// Only what the theme uses of a Worker is here: post messages, receive them.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      this.frame = frame.contentWindow;
      this.frame.document.write(`<script src="${script}"></script>`);
      this.frame.document.close();
      this.ready = new Promise((resolve) => frame.addEventListener("load", resolve));
      this.frame.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    }
    postMessage(data) {
      this.ready.then(() => this.frame.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}

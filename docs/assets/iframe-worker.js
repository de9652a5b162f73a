// Search works in a worker, and browsers start none for pages from disk. There the worker's script
// runs in a hidden frame instead. The theme's usual shim would be fetched from the network.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      const run = (source) =>
        new Promise((done, failed) => {
          const script = inside.document.createElement("script");
          script.src = source;
          script.onload = done;
          script.onerror = () => failed(new Error(`${source} was not found`));
          inside.document.head.append(script);
        });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      // Scripts follow one another; the search worker waits for what this returns.
      inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => run(source)), Promise.resolve());
      this.ready = run(address);
    }

    postMessage(data) {
      this.ready.then(() => {
        const inside = this.frame.contentWindow;
        inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      });
    }

    terminate() {
      this.frame.remove();
    }
  };
}

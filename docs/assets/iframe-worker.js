// Browsers start no Worker from a page that was opened as a file. For the search of this site there, a Worker is a hidden
// frame: its script has the frame's window in place of a worker's own scope, and messages go to and fro as events.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const load = (source) =>
        new Promise((done, failed) => {
          const script = inside.document.createElement("script");
          Object.assign(script, { src: source, onload: done, onerror: failed });
          inside.document.head.append(script);
        });
      inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const started = load(String(address));
      this.postMessage = (data) =>
        started.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
      this.terminate = () => frame.remove();
    }
  };
}

/* Search from a folder of files: browsers start no worker from file://, so its script runs in a hidden frame.
   It takes the place of the script of this name that the theme would fetch from elsewhere. */
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.appendChild(frame);
    this.inner = frame.contentWindow;
    this.ready = new Promise((resolve) => (this.arrived = resolve));
    const page = this.inner.document;
    page.open();
    page.write("<!doctype html><body></body>");
    page.close();
    this.inner.postMessage = (data) => setTimeout(() => this.deliver(data));
    this.inner.importScripts = (...urls) => Promise.all(urls.map((one) => this.load(one)));
    this.load(url).then(this.arrived);
  }

  load(url) {
    return new Promise((resolve, reject) => {
      const script = this.inner.document.createElement("script");
      Object.assign(script, { src: url, onload: resolve, onerror: reject });
      this.inner.document.body.appendChild(script);
    });
  }

  deliver(data) {
    const told = new MessageEvent("message", { data });
    this.dispatchEvent(told);
    if (this.onmessage) this.onmessage(told);
  }

  postMessage(data) {
    this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    this.inner.frameElement.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;

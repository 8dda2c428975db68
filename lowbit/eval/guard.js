// Runs one generated JavaScript program; guard.py becomes Node.js with this source once it has set the limits.
//
// The program finds the names of ECMAScript, those of KEPT and a silent console, nothing else of Node's: no process, no fetch.
// `require` loads MODULES; any other name fails the program, even if it catches the error. A program that ran to its end, promises
// and timers included, has passed. The isolation around this process protects the machine, not the names missing here.
"use strict";

(() => {
  const MODULES = ["assert", "assert/strict", "buffer", "crypto", "events", "path", "querystring", "string_decoder", "url", "util"];
  const KEPT = [
    ...["Buffer", "TextDecoder", "TextEncoder", "URL", "URLSearchParams", "atob", "btoa", "structuredClone"],
    ...["clearImmediate", "clearInterval", "clearTimeout", "queueMicrotask", "setImmediate", "setInterval", "setTimeout"],
  ];

  const fs = require("node:fs");
  const vm = require("node:vm");
  const process = globalThis.process;
  const modules = new Map(MODULES.map((name) => [name, require(`node:${name}`)]));
  const TYPES = [
    ...[Error, EvalError, RangeError, ReferenceError, SyntaxError, TypeError, URIError, AggregateError],
    modules.get("assert").AssertionError,
  ];
  const names = new Map(TYPES.map((type) => [type.prototype, type.name]));
  // The name of the error's type, or of the type in TYPES that it derives from: never the error's text.
  const kind = (error) => {
    let type = Object.getPrototypeOf(error);
    while (!names.has(type)) {
      type = Object.getPrototypeOf(type);
    }
    return names.get(type);
  };
  const request = JSON.parse(fs.readFileSync(0, "utf8"));
  const attempts = [];
  let ended = false;

  const report = (passed, reason) => {
    const line = reason.slice(0, 80).replace(/\s/g, " ");
    fs.writeSync(request.channel, `${request.token}\t${passed ? "passed" : "failed"}\t${line}\n`);
  };
  process.on("uncaughtException", (error) => {
    report(false, attempts[0] ?? (error instanceof Error ? kind(error) : `thrown: a ${typeof error}`));
    process.exit(1);
  });
  process.on("exit", (status) => {
    if (status === 0 && ended) {
      report(attempts.length === 0, attempts[0] ?? "");
    }
  });

  // What an own property holds is not looked up in the prototype, which a program has by require("events").
  Object.defineProperty(process, "emit", { value: process.emit, writable: false, configurable: false });

  const allowed = new Set([...vm.runInNewContext("Object.getOwnPropertyNames(globalThis)"), ...KEPT]);
  for (const name of Object.getOwnPropertyNames(globalThis)) {
    if (!allowed.has(name)) {
      delete globalThis[name];
    }
  }
  // Node's own console.assert only prints, so that every test would pass.
  const silent = Object.fromEntries(Object.keys(globalThis.console).map((name) => [name, () => {}]));
  globalThis.console = { ...silent, assert: modules.get("assert") };
  globalThis.require = (name) => {
    const found = modules.get(String(name).replace(/^node:/, ""));
    if (found === undefined) {
      attempts.push(`refused: require(${JSON.stringify(name)})`);
      throw new Error(attempts[0]);
    }
    return found;
  };

  const run = async () => {
    await new vm.Script(request.program, { filename: "generated.js" }).runInThisContext();
    ended = true;
  };
  run();
})();

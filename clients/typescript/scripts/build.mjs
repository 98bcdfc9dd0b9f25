// Builds the package: the same sources as ES modules and as CommonJS, each with its types.

import { execFileSync } from "node:child_process";
import { rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";

const directory = fileURLToPath(new URL("..", import.meta.url));
const tsc = createRequire(import.meta.url).resolve("typescript/bin/tsc");

rmSync(`${directory}dist`, { recursive: true, force: true });
for (const form of ["esm", "cjs"]) {
  const project = `${directory}tsconfig.${form}.json`;
  execFileSync(process.execPath, [tsc, "--project", project], { stdio: "inherit" });
}
// The package is of type "module". This says that the files below are not.
writeFileSync(`${directory}dist/cjs/package.json`, '{ "type": "commonjs" }\n');

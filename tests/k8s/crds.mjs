// Validates custom resources: crds.mjs NODE_MODULES, a JSON list on stdin, a line for each fault on stdout.
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const PACKAGES = {
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
  "gateway.networking.k8s.io": "gateway-api",
  "cert-manager.io": "cert-manager",
};

for (const manifest of JSON.parse(readFileSync(0, "utf8"))) {
  const { apiVersion, kind, metadata } = manifest;
  const folder = resolve(process.argv[2], "@kubernetes-models", PACKAGES[apiVersion.split("/")[0]], apiVersion);
  const module = await import(pathToFileURL(`${folder}/${kind}.js`));
  const Model = module[kind] ?? module.default[kind]; // an ES module, or an older CommonJS one
  try {
    new Model(manifest).validate();
  } catch (error) {
    console.log(`${kind} ${metadata.name}: ${error.message}`);
  }
}

// The releases whose CustomResourceDefinitions the tests of the Helm chart load. Only the YAML files in
// these modules are used: `go mod download` writes go.sum, and `go mod tidy` would empty this file.
module kubefan/tests/crds

go 1.26.0

require (
	github.com/cert-manager/cert-manager v1.21.2
	github.com/cert-manager/trust-manager v0.25.0
	github.com/prometheus-operator/prometheus-operator v0.85.0
)

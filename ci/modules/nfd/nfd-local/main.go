// The client of Node Feature Discovery, which also reads feature files: the published one does not.
package main

import (
	"sigs.k8s.io/node-feature-discovery/cmd/nfd/subcmd"
	_ "sigs.k8s.io/node-feature-discovery/source/local"
)

func main() { subcmd.Execute() }

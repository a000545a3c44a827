# shellcheck shell=bash disable=SC2034  # ci/modules/build uses the variables
# The programs ask themselves which release they are.
release=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
IFS=. read -r major minor _ <<< "${release#v}"
for value in "gitVersion=$release" "gitMajor=$major" "gitMinor=$minor" gitTreeState=archive gitCommit=; do
    values+=" k8s.io/component-base/version.$value"
done

"""An AdmissionPolicy as objects of the API server: `admission.admit` in CEL.

A MutatingAdmissionPolicy (stable from Kubernetes 1.36) cannot refuse a pod with a reason, so a
ValidatingAdmissionPolicy refuses pods that still use the name afterwards, where they did not before.
Expressions use only functions that every version with these policies has. An expression may have at most
100,000 characters, so each class is a separate variable.
"""

from __future__ import annotations

import json

from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.admission.admission import (
    ABSENT,
    LISTS,
    NODE,
    NOWHERE,
    OPERATIONS,
    REQUIREMENTS,
    SHOWN,
    UNPLACED,
    WANTED,
    WIDE,
    WIDEST,
)
from imagematrix.integrations.kubernetes.client.objects import make_manifest
from imagematrix.integrations.kubernetes.nodes.labels import CLASS
from imagematrix.integrations.kubernetes.workloads.affinity import LIMIT, REQUIRED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.integrations.kubernetes.admission.admission import AdmissionPolicy, PodClass
    from imagematrix.integrations.kubernetes.client.objects import Manifest

API = "admissionregistration.k8s.io/v1"
LONGEST = 90_000  # characters of an expression; the API server accepts 100,000
LARGEST = 260_000  # characters of an object; `kubectl apply` keeps 262,144
IMAGE, NODES = "!image", "!nodes"  # keys besides labels, none of which begins with "!"
# Integers of 64 bits by their text. CEL cannot convert others, and texts of one length have the same order.
NUMBERS = (("-?[0-9]{1,18}", None), ("[0-9]{19}", str(LIMIT - 1)), ("-[0-9]{19}", str(-LIMIT)))
NODE_AFFINITY = "object.spec.affinity.nodeAffinity"
SELECTOR = f"{NODE_AFFINITY}.{REQUIRED}"
TERMS = f"{SELECTOR}.nodeSelectorTerms"
NEW = "request.operation == 'CREATE'"  # only then is there no `oldObject`


def make_policy_objects(policy: AdmissionPolicy, name: str) -> Iterator[Manifest]:
    """Yield the mutating policy and its binding; for a policy that denies, also the validating ones.

    Raises UsageError if there are too many classes for an expression in CEL, or for an object.
    """
    condition = {"name": "uses-the-image", "expression": make_use_condition(policy)}
    shared = {"matchConstraints": {"resourceRules": make_rules()}, "matchConditions": [condition]}
    variables = [{"name": key, "expression": text} for key, text in make_variables(policy).items()]
    mutating = {
        **shared,
        "failurePolicy": "Fail" if policy.deny else "Ignore",
        "reinvocationPolicy": "IfNeeded",
        "variables": variables,
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": make_mutation(policy)}}],
    }
    # It is larger than the validating one.
    is_too_large = len(json.dumps(mutating, ensure_ascii=False)) > LARGEST
    if is_too_large or max(len(variable["expression"]) for variable in variables) > LONGEST:
        raise UsageError(
            f"too many classes for a policy: {len(policy.classes)}",
            remedy="use the webhook, which has no such limit: `imagematrix kubernetes render install --help`",
        )
    yield make_manifest(API, "MutatingAdmissionPolicy", name, spec=mutating)
    yield make_manifest(API, "MutatingAdmissionPolicyBinding", name, spec={"policyName": name})
    if policy.deny:
        validation = {
            "expression": f"!({make_use_condition(policy)})",
            "messageExpression": make_refusal(policy),
        }
        validating = {**shared, "failurePolicy": "Fail", "variables": variables, "validations": [validation]}
        yield make_manifest(API, "ValidatingAdmissionPolicy", name, spec=validating)
        binding = {"policyName": name, "validationActions": ["Deny"]}
        yield make_manifest(API, "ValidatingAdmissionPolicyBinding", name, spec=binding)


def make_variables(policy: AdmissionPolicy) -> dict[str, str]:
    """Return the CEL variables by name; each may use the previous ones."""
    has_names = NODE not in policy.omitted_labels
    classes = {
        f"class{index}": _make_class_map(pod_class, has_names=has_names)
        for index, pod_class in enumerate(policy.classes)
    }
    class_names = ", ".join(f"variables.{name}" for name in classes)
    has_affinity = f"has(object.spec.affinity) && has({NODE_AFFINITY})"
    counts = [f"(has(object.spec.{name}) && size(object.spec.{name}) > {WIDEST})" for name in LISTS]
    is_wide_term = " || ".join(
        f"(has(t.{name}) && (size(t.{name}) > {WIDEST} || "
        f"t.{name}.exists(e, has(e.values) && size(e.values) > {WANTED})))"
        for name in REQUIREMENTS
    )
    is_on_node = f"has(object.spec.nodeName) && {_make_node_condition('object.spec.nodeName')}"
    is_known = f"variables.classes.exists(c, {_make_node_condition('e.values[0]')})"
    is_new = f"{_make_name_condition('In')} && !{is_known}"
    return {
        **classes,
        # CEL has no loop with an index: a filter of these numbers stands for it.
        "places": f"[{', '.join(map(str, range(WIDEST)))}]",
        "classes": f"[{class_names}]",
        "required": f"{has_affinity} && has({SELECTOR})",
        "terms": f"variables.required && has({TERMS}) ? {TERMS} : []",
        "wide": " || ".join(
            [f"size(variables.terms) > {WIDEST}", *counts, f"variables.terms.exists(t, {is_wide_term})"]
        ),
        "on_new_node": (
            "has(object.spec.nodeName) && "
            f"!variables.classes.exists(c, {_make_node_condition('object.spec.nodeName')})"
        ),
        # Of each term, the names of nodes that no class has.
        "new_nodes": (
            "variables.terms.filter(t, has(t.matchFields))"
            f".map(t, t.matchFields.filter(e, {is_new}).map(e, e.values[0]))"
        ),
        "left": f"variables.classes.filter(c, {NEW} ? {_make_class_condition()} : {is_on_node})",
        "images": f"variables.left.map(c, c[{_quote(IMAGE)}][0]).filter(i, i != '')",
        "image": (
            "!variables.wide && size(variables.images) > 0 && "
            "variables.images.all(i, i == variables.images[0]) ? variables.images[0] : ''"
        ),
        "names": (
            f"variables.classes.filter(c, c[{_quote(IMAGE)}][0] == variables.image)"
            f".map(c, c[{_quote(CLASS)}][0])"
        ),
    }


def make_mutation(policy: AdmissionPolicy) -> str:
    """Return the expression of the JSON patch, which is empty if the image is undecided."""
    patches = [_make_image_operations(policy, name) for name in LISTS]
    placing = f"({NEW} ? {_make_affinity_operations()} : [])"
    return f"variables.image == '' ? [] : {' + '.join(patches)} + {placing}"


def make_refusal(policy: AdmissionPolicy) -> str:
    """Return the expression of the message for a pod that still uses the name."""
    start = f"{_quote(f'{policy.name}: ')} + "
    which = (
        f"(size(variables.left) > {SHOWN} ? string(size(variables.left)) + ' classes' : "
        f"variables.left.map(c, c[{_quote(CLASS)}][0]).join(', '))"
    )
    nowhere = f"({NEW} ? {_quote(NOWHERE)} : {_quote(UNPLACED)})"
    nothing = f"{_quote('no image fits the nodes that the pod may run on: ')} + {which}"
    several = (
        f"{_quote('the nodes that the pod may run on need different images: ')} + {which} + "
        f"{_quote(f'; select one by {CLASS}')}"
    )
    return (
        f"{start}(variables.wide ? {_quote(WIDE)} : size(variables.left) == 0 ? {nowhere} : "
        f"size(variables.images) == 0 ? {nothing} : {several})"
    )


def make_use_condition(policy: AdmissionPolicy) -> str:
    """Return the expression that is true if a pod uses the name in a container that did not use it before."""
    return " || ".join(
        f"(has(object.spec.{containers}) && "
        f"object.spec.{containers}.exists(c, {_make_list_condition(policy, containers, 'c')}))"
        for containers in LISTS
    )


def make_rules() -> list[Manifest]:
    """Return the rules by which an API server asks about each request that sets the image of a pod."""
    return [
        {"apiGroups": [""], "apiVersions": ["v1"], "operations": list(operations), "resources": [resource]}
        for resource, operations in OPERATIONS.items()
    ]


def _make_list_condition(policy: AdmissionPolicy, containers: str, container: str) -> str:
    """Return the expression that is true if a container, of a list of a pod, uses the name since the request.

    Otherwise an update of a label or a finalizer would be about the image, too.
    """
    name, old = _quote(policy.name), f"oldObject.spec.{containers}"
    before = f"o.name == {container}.name && has(o.image) && o.image == {name}"
    return (
        f"has({container}.image) && {container}.image == {name} && "
        f"({NEW} || !has({old}) || !{old}.exists(o, {before}))"
    )


def _make_class_map(pod_class: PodClass, *, has_names: bool) -> str:
    """Return a class as a map of lists of strings: in Kubernetes' CEL, values of a map have one type."""
    entries = {
        CLASS: (pod_class.name,),
        IMAGE: (pod_class.image,),
        **({NODES: pod_class.nodes} if has_names and pod_class.nodes else {}),
        **pod_class.values,
    }
    lists = [f"{_quote(key)}: [{', '.join(map(_quote, values))}]" for key, values in entries.items()]
    return f"{{{', '.join(lists)}}}"


def _make_node_condition(name: str) -> str:
    """Return the expression that is true if a class `c` is known to have the node."""
    return f"({_quote(NODES)} in c && {name} in c[{_quote(NODES)}])"


def _make_name_condition(operator: str) -> str:
    """Return the expression that is true if a requirement `e` of `matchFields` is about a node's name."""
    return (
        f"(e.key == {_quote(NODE)} && e.operator == {_quote(operator)} && "
        "has(e.values) && size(e.values) == 1)"
    )


def _make_class_condition() -> str:
    labels, wanted, nodes = "object.metadata.labels", "object.spec.nodeSelector", _quote(NODES)
    labelled = f"!has({labels}) || !({_quote(CLASS)} in {labels})"
    labelled += f" || {labels}[{_quote(CLASS)}] == c[{_quote(CLASS)}][0]"
    bound = "!has(object.spec.nodeName) || object.spec.nodeName == '' || variables.on_new_node"
    bound += f" || !({nodes} in c) || object.spec.nodeName in c[{nodes}]"
    selected = f"!has({wanted}) || {wanted}.all(k, !(k in c) || {wanted}[k] in c[k])"
    # A term matches if it has requirements, and all hold as far as the class has values of their labels.
    has_any = " || ".join(f"(has(t.{name}) && size(t.{name}) > 0)" for name in REQUIREMENTS)
    has_labels = f"t.matchExpressions.all(e, !(e.key in c) || {_make_requirement_condition()})"
    has_fields = f"t.matchFields.all(e, !({nodes} in c) || {_make_field_condition()})"
    meets_all = f"(!has(t.matchExpressions) || {has_labels}) && (!has(t.matchFields) || {has_fields})"
    matched = f"!variables.required || variables.terms.exists(t, ({has_any}) && {meets_all})"
    return f"({' && '.join(f'({condition})' for condition in (labelled, bound, selected, matched))})"


def _make_field_condition() -> str:
    """Return the expression of `find_by_field`. To look a name up costs as much as the class has nodes."""
    nodes = f"c[{_quote(NODES)}]"
    is_one = f"e.values[0] in {nodes} || variables.new_nodes.exists(n, e.values[0] in n)"
    return (
        f"({_make_name_condition('In')} ? ({is_one}) : "
        f"!{_make_name_condition('NotIn')} || {nodes} != [e.values[0]])"
    )


def _make_requirement_condition() -> str:
    label_values, absent = "c[e.key]", _quote(ABSENT)

    def make_comparison(sign: str) -> str:
        return (
            f"has(e.values) && size(e.values) > 0 && {_make_number_condition('e.values[0]')} && "
            f"{label_values}.exists(v, {_make_number_condition('v')} && int(v) {sign} int(e.values[0]))"
        )

    cases = {
        "In": f"has(e.values) && {label_values}.exists(v, v in e.values)",
        "NotIn": f"!has(e.values) || {label_values}.exists(v, !(v in e.values))",
        "Exists": f"{label_values}.exists(v, v != {absent})",
        "DoesNotExist": f"{absent} in {label_values}",
        "Gt": make_comparison(">"),
        "Lt": make_comparison("<"),
    }
    text = "true"
    for operator, condition in reversed(cases.items()):
        text = f"(e.operator == {_quote(operator)} ? ({condition}) : {text})"
    return text


def _make_number_condition(text: str) -> str:
    cases = [
        f"({text}.matches({_quote(f'^{pattern}$')}){f' && {text} <= {_quote(greatest)}' if greatest else ''})"
        for pattern, greatest in NUMBERS
    ]
    return f"({' || '.join(cases)})"


def _make_image_operations(policy: AdmissionPolicy, name: str) -> str:
    items = f"object.spec.{name}"
    patch = (
        f"JSONPatch{{op: 'replace', path: '/spec/{name}/' + string(i) + '/image', value: variables.image}}"
    )
    return (
        f"(has({items}) ? variables.places.filter(i, i < size({items}) && "
        f"{_make_list_condition(policy, name, f'{items}[i]')}).map(i, {patch}) : [])"
    )


def _make_affinity_operations() -> str:
    """Return the expression of the operations on the affinity; values of several types in a map are dyn."""
    expression = f"{{'key': dyn({_quote(CLASS)}), 'operator': dyn('In'), 'values': dyn(variables.names)}}"
    selector = f"{{'nodeSelectorTerms': [{{'matchExpressions': [{expression}]}}]}}"
    inner = f"{{{_quote(REQUIRED)}: {selector}}}"
    where = "/spec/affinity/nodeAffinity"
    terms = f"'{where}/{REQUIRED}/nodeSelectorTerms/' + string(i) + '/matchExpressions"
    term = "variables.terms[i]"
    asks = f"has({term}.matchExpressions) && size({term}.matchExpressions) > 0"
    in_terms = (
        f"variables.places.filter(i, i < size(variables.terms) && (({asks}) || (has({term}.matchFields) && "
        f"size({term}.matchFields) > 0))).map(i, {asks} ? "
        f"JSONPatch{{op: 'add', path: {terms}/-', value: {expression}}} : "
        f"JSONPatch{{op: 'add', path: {terms}', value: [{expression}]}})"
    )
    return (
        f"(variables.required ? {in_terms} : !has(object.spec.affinity) ? "
        f"[JSONPatch{{op: 'add', path: '/spec/affinity', value: {{'nodeAffinity': {inner}}}}}] : "
        f"!has({NODE_AFFINITY}) ? [JSONPatch{{op: 'add', path: '{where}', value: {inner}}}] : "
        f"[JSONPatch{{op: 'add', path: '{where}/{REQUIRED}', value: {selector}}}])"
    )


def _quote(text: str) -> str:
    """Return a text as a literal of CEL, which has no surrogates."""
    return json.dumps(text, ensure_ascii=False)

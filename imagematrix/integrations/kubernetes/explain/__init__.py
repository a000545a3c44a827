"""Why a pod cannot start: what each node lacks for it."""

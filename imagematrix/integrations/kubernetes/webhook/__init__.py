"""The admission webhook: `admission.admit` for clusters without admission policies."""

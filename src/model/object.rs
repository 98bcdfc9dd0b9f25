//! One Kubernetes object: its key and labels, and its bytes.

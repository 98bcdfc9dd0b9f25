// Package kubefan lists and watches Kubernetes objects from a kubefan, over gRPC.
//
// A watch survives its connection. It reconnects with the last version that it may resume from, so
// no change is lost, repeated or reordered. It also decodes compressed snapshots and deltas, renews
// its token, and moves to another connection when the server asks for that.
//
// Programs that use client-go's informers or controller-runtime import the packages informers and
// ctrlcache beside this one. This package needs neither.
package kubefan

// Package transport lets programs that are built with client-go, such as those of
// controller-runtime, read through a kubefan, and from the apiserver while the kubefan is away.
//
//	config, err := rest.InClusterConfig()
//	if err != nil {
//		return err
//	}
//	if err := transport.Attach(config, transport.Options{}); err != nil {
//		return err
//	}
//	clientset, err := kubernetes.NewForConfig(config)
//
// Call Attach once, before the configuration is used. Copies of the configuration share the
// transport.
//
// # What goes to kubefan
//
// Watches, also those that begin with the state (kubefan proves that it is fresh), and lists and
// gets with a resourceVersion. Everything else goes to the apiserver, with the credentials of the
// configuration: writes, reads without a resourceVersion, pages and lists at exactly one version,
// subresources such as log and exec, impersonation, and paths that name no resource.
//
// A read to kubefan has the header Cache-Control: only-if-cached. If the cache has no answer,
// kubefan says so with 504 instead of passing the read on, and the same read goes to the apiserver
// at once. After three such answers in a row, reads of that resource, in that form and namespace,
// go to the apiserver for half a minute. Then kubefan is asked again. The time doubles while its
// answer stays the same, up to five minutes. An older kubefan passes reads on, which counts the
// same.
//
// The kubefan has a TLS configuration of its own. It gets the client certificate and the bearer
// token of the configuration: a token passes through to the apiserver, a certificate cannot.
//
// # When kubefan is away
//
// kubefan is away if there is no connection, or if its health service does not say that it serves
// after six seconds without an answer, or after an error that may be of a server in its place: a
// 5xx, 429 for ten seconds, or a 401, 403 or 404 without a name. Then reads go to the apiserver
// until the health service has answered for half a minute, or once if the apiserver has answered no
// read in this outage. The half minute doubles each time that kubefan fails soon after a return, up
// to ten minutes.
//
// A 410, a 504 for a version that the state has not reached, and what the apiserver says are
// answers. Other errors of a kubefan that serves are no outage: the apiserver is asked the same. If
// it answers after a 401, 403 or 404, it is asked for the next half a minute, or longer if kubefan
// said the same before. After a 404 of kubefan's own, which says that there is no cache, it is
// asked without the budget. After a 5xx, such as that of a kubefan which cannot reach the
// apiserver, after 429 for ten seconds, and without an answer, only this read goes there.
//
// A watch whose connection is lost ends so that client-go resumes from its last version, without a
// list: versions of kubefan are those of the apiserver. An HTTP/2 PING finds a kubefan that hangs
// within eight seconds. After a return the watches at the apiserver end within a minute, at random
// moments.
//
// Reads of only a part of a collection (shardSelector) never move, as an apiserver without that
// feature would answer with everything. They wait.
//
// # The budget
//
// The hazard is a fleet of programs that all turn to the apiserver at once. So each program starts
// one read there in a window of Clients/StartsPerSecond of the Budget, by default in a second, and
// the first one at a random moment of the first window. A watch that resumes waits for the second
// window: programs without a state go first. A program may start the reads of ten seconds at once,
// and pauses then. A header of kubefan's answers, Kubefan-Fallback, replaces the budget, whose
// window has at most ten minutes. FallbackNever lets reads wait for kubefan instead.
//
// # Metrics
//
// Register sets metrics, in the way of client-go's tools/metrics.
package transport

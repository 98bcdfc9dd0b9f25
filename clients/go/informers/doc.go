// Package informers runs client-go's informers over a kubefan's gRPC.
//
// A ListWatch takes the place of cache.NewListWatchFromClient; reflectors, shared informers,
// listers and work queues stay client-go's own.
//
// # What each thing becomes
//
// Objects are decoded to the type of the example object, from JSON or, with
// kubefan.EncodingProtobuf, from protobuf, as client-go's clients decode them. An event's resource
// version is that of the object, with a projection too. Everything at or below a bookmark has been
// delivered.
//
// A gap or a catch-up is held back until its end, and then delivered in the order of versions. If
// the stream breaks inside it, nothing of it is delivered. If it has a deletion whose final state
// is unknown, the watch ends with 410 Expired instead: client-go can express such a deletion, a
// cache.DeletedFinalStateUnknown, only as the result of a new list, which kubefan serves from
// memory.
//
// A watch that breaks after its initial state resumes by itself: the reflector notices nothing and
// lists nothing. Only an expired version, or an error that no retry can resolve, reaches the
// reflector.
package informers

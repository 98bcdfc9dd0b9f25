package transport

import (
	"net/http"
	"time"

	"kubefan.dev/clients/go/internal/fallback"
)

// budgetHeader is a header of kubefan's answers. It tells the clients how to share the apiserver
// while kubefan is away: it is a Dictionary (RFC 9651) with the members
//
//	Kubefan-Fallback: clients=3000, rate=50
//
// clients is the number of clients that share the budget, an Integer of at least 1. rate is the
// number of requests per second that all of them together may start at the apiserver, an Integer or
// a Decimal above 0. Other members and parameters are ignored. A header without both members, or
// with a wrong value, is ignored as a whole.
//
// It is no RateLimit-Policy of draft-ietf-httpapi-ratelimit-headers, because such a policy is about
// requests to the server that sends it, and generic clients would limit themselves at kubefan.
const budgetHeader = "Kubefan-Fallback"

const (
	clientsMax = 1_000_000
	rateMin    = 0.001
	rateMax    = 1_000_000
	// windowMax bounds how long a read waits for its start because of a wrong budget.
	windowMax = 10 * time.Minute
)

// Budget limits the requests that clients start at the apiserver while kubefan is away.
type Budget struct {
	// Clients is the number of programs that share the budget, such as the number of nodes of a
	// DaemonSet. Default: 100.
	Clients int
	// StartsPerSecond is the number of requests that all of them together start at the apiserver in
	// a second. Default: 100.
	StartsPerSecond float64
}

func (b Budget) withDefaults() Budget {
	if b.Clients <= 0 {
		b.Clients = 100
	}
	if b.StartsPerSecond <= 0 {
		b.StartsPerSecond = 100
	}
	return b
}

// window is the time in which each client may start one request, at most windowMax.
func (b Budget) window() time.Duration {
	clients, rate := min(b.Clients, clientsMax), min(max(b.StartsPerSecond, rateMin), rateMax)
	return min(time.Duration(float64(clients)/rate*float64(time.Second)), windowMax)
}

// budgetOf reads the budget that an answer of kubefan names.
func budgetOf(header http.Header) (Budget, bool) {
	told, ok := fallback.ParseBudget(header.Values(budgetHeader))
	return Budget{Clients: min(told.Clients, clientsMax), StartsPerSecond: told.StartsPerSecond}, ok
}

package fallback

import (
	"strconv"
	"strings"
	"time"
)

// BudgetKey is the metadata of kubefan's answers that tells clients how to share the apiserver.
const BudgetKey = "kubefan-fallback"

const (
	defaultClients = 100
	defaultRate    = 10
	windowMax      = 10 * time.Minute
	// clientsKept is for how long a larger number of clients counts after smaller ones were told. A
	// kubefan that has just started does not know all of its clients yet.
	clientsKept = 10 * time.Minute
)

// Budget limits the reads that clients start at the apiserver while kubefan is away.
type Budget struct {
	// Clients is the number of programs that share the budget, such as the number of nodes of a
	// DaemonSet. Default: 100.
	Clients int
	// StartsPerSecond is the number of reads that all of them together start at the apiserver in a
	// second. Default: 10.
	StartsPerSecond float64
}

// Window is the time in which each client may start one read; at most ten minutes.
func (b Budget) Window() time.Duration {
	clients, rate := b.Clients, b.StartsPerSecond
	if clients <= 0 {
		clients = defaultClients
	}
	if rate <= 0 {
		rate = defaultRate
	}
	seconds := min(float64(clients)/rate, windowMax.Seconds())
	return time.Duration(seconds * float64(time.Second))
}

// KnownClients is the number of clients that kubefan has told.
type KnownClients struct {
	count int
	// smallerSince is the time since which kubefan told only smaller ones.
	smallerSince time.Time
}

// Note takes a number that kubefan tells, and returns the one that counts: a smaller one only after
// smaller ones alone were told for ten minutes.
func (k *KnownClients) Note(told int, now time.Time) int {
	isSmaller := told < k.count
	switch {
	case isSmaller && k.smallerSince.IsZero():
		k.smallerSince = now
	case !isSmaller || now.Sub(k.smallerSince) >= clientsKept:
		k.count, k.smallerSince = told, time.Time{}
	}
	return k.count
}

// ParseBudget reads the budget that an answer of kubefan names. A value without both members, or
// with a wrong one, is ignored as a whole.
func ParseBudget(values []string) (Budget, bool) {
	found := Budget{}
	for member := range strings.SplitSeq(strings.Join(values, ","), ",") {
		member, _, _ = strings.Cut(member, ";")
		name, value, _ := strings.Cut(strings.TrimSpace(member), "=")
		switch name {
		case "clients":
			found.Clients = 0
			if number, err := strconv.ParseUint(value, 10, 31); err == nil {
				found.Clients = int(number)
			}
		case "rate":
			found.StartsPerSecond = 0
			// Digits and a point only: ParseFloat also reads "Inf" and "1e9".
			if number, err := strconv.ParseFloat(value, 64); err == nil && strings.Trim(value, "0123456789.") == "" {
				found.StartsPerSecond = number
			}
		}
	}
	return found, found.Clients > 0 && found.StartsPerSecond > 0
}

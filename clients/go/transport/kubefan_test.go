package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"k8s.io/client-go/rest"

	"kubefan.dev/clients/go/internal/fallback"
)

const (
	list    = "/api/v1/pods?resourceVersion=0"
	watch   = "/api/v1/pods?watch=true"
	resume  = "/api/v1/pods?watch=true&resourceVersion=7"
	latest  = "/api/v1/pods"
	nodes   = "/api/v1/nodes?resourceVersion=0"
	sharded = "/api/v1/pods?watch=true&shardSelector=x"
)

func TestReadsGoToKubefanAndEverythingElseToTheApiserver(t *testing.T) {
	for _, speaks := range []protocol{http1, http2, plain} {
		t.Run(string(speaks), func(t *testing.T) {
			pair := attached(t, setting{speaks: speaks})
			pair.expect(list, "200 kubefan")
			pair.expect(watch, "200 kubefan")
			pair.expect(latest, "200 apiserver")
			pair.expect("/version", "200 apiserver")
			token := pair.kubefan.received()[0].Header.Get("Authorization")
			if isSent := token == "Bearer secret"; isSent != (speaks != plain) || !isSent && token != "" {
				t.Errorf("kubefan got the token %q", token)
			}
			pair.wereAsked(nil, []string{"GET " + latest, "GET /version"})
		})
	}
}

func TestThePathOfEachAddressIsPutBeforeThatOfTheRequest(t *testing.T) {
	pair := attached(t, setting{
		options: Options{Address: "/fan/"}, config: func(config *rest.Config) { config.Host += "/clusters/c" },
	})
	pair.expect(list, "200 kubefan")
	pair.expect(latest, "200 apiserver")
	pair.wereAsked([]string{"GET /fan" + list}, []string{"GET /clusters/c" + latest})
}

func TestWhatKubefanPassesOnThreeTimesGoesToTheApiserverForAWhile(t *testing.T) {
	pair := attached(t, setting{})
	pair.kubefan.on(says(http.StatusOK, "passed on", "Cache-Status: kubefan; fwd=bypass"))
	pair.expect(list, "200 passed on")
	// A watch may have a cache where a list has none, and a version may be too old for a cache.
	for range passedOnMax {
		pair.expect(resume, "200 passed on")
	}
	pair.expect(list, "200 passed on")
	pair.expect(list, "200 passed on")
	pair.expect(list, "200 apiserver")
	pair.clock.advance(learnedMin)
	pair.kubefan.asked()
	pair.kubefan.on(says(http.StatusOK, "kubefan", hit))
	pair.expect(list, "200 kubefan")
	pair.kubefan.on(says(http.StatusOK, "passed on"))
	pair.expect(list, "200 passed on")
	pair.wereAsked([]string{"GET " + list, "GET " + list}, []string{"GET " + list})
}

func TestWhatTheCacheDoesNotAnswerGoesToTheApiserverAtOnce(t *testing.T) {
	for name, fallback := range map[string]Fallback{"FallbackPaced": FallbackPaced, "FallbackNever": FallbackNever} {
		t.Run(name, func(t *testing.T) {
			pair := attached(t, setting{options: Options{Fallback: fallback, Budget: Budget{Clients: 3000, StartsPerSecond: 1}}})
			pair.kubefan.on(says(http.StatusGatewayTimeout, "{}", notCached, "Content-Type: application/json"))
			// A version may be too old for a cache.
			for range passedOnMax + 1 {
				pair.expect(resume, "200 apiserver")
			}
			resumes := slices.Repeat([]string{"GET " + resume}, passedOnMax+1)
			pair.wereAsked(resumes, resumes)
			// What the apiserver refuses too says nothing about the cache.
			pair.apiserver.on(says(http.StatusForbidden, "the caller's own"))
			pair.expect(list, "403 the caller's own")
			pair.apiserver.on(says(http.StatusOK, "apiserver"))
			for range passedOnMax + 1 {
				pair.expect(list, "200 apiserver")
			}
			pair.wereAsked(slices.Repeat([]string{"GET " + list}, passedOnMax+1), slices.Repeat([]string{"GET " + list}, passedOnMax+2))
			pair.clock.advance(learnedMin)
			pair.kubefan.on(says(http.StatusOK, "kubefan", hit))
			pair.expect(list, "200 kubefan")
			if lines := pair.logged.all(); len(lines) != 1 || !strings.Contains(lines[0], "one kind of read goes to the apiserver") {
				t.Error("not one line, or one of an outage", lines)
			}
		})
	}
}

func TestKubefanForwardsNoReadThatTheApiserverCanAnswer(t *testing.T) {
	pair := attached(t, setting{})
	pair.kubefan.on(says(http.StatusGatewayTimeout, "{}", notCached, "Content-Type: application/json"))
	pair.expect(list, "200 apiserver")
	pair.expect(sharded, "504 {}")
	for _, row := range []struct {
		server *server
		want   []string
	}{{pair.kubefan, []string{onlyIfCached, ""}}, {pair.apiserver, []string{""}}} {
		got := []string{}
		for _, received := range row.server.received() {
			got = append(got, received.Header.Get("Cache-Control"))
		}
		if !slices.Equal(got, row.want) {
			t.Errorf("%s was asked with %q", row.server.URL, got)
		}
	}
}

func TestTheApiserverDecidesWhatKubefanRefuses(t *testing.T) {
	for _, status := range []int{http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound} {
		t.Run(http.StatusText(status), func(t *testing.T) {
			pair := attached(t, setting{})
			pair.kubefan.on(says(status, "refused"))
			pair.apiserver.on(says(status, "the caller's own"))
			pair.expect(list, fmt.Sprint(status, " the caller's own"))
			pair.expect(list, fmt.Sprint(status, " the caller's own"))
			pair.wereAsked([]string{"GET " + list, "GET " + list}, []string{"GET " + list, "GET " + list})

			pair.apiserver.on(says(http.StatusOK, "apiserver"))
			pair.expect(list, "200 apiserver")
			pair.expect(list, "200 apiserver")
			pair.wereAsked([]string{"GET " + list}, []string{"GET " + list, "GET " + list})
			pair.clock.advance(learnedMin)
			pair.kubefan.on(says(http.StatusOK, "kubefan", hit))
			pair.expect(list, "200 kubefan")
			if lines := pair.logged.all(); len(lines) != 1 || !strings.Contains(lines[0], "one kind of read goes to the apiserver") {
				t.Error("not one line, or one of an outage", lines)
			}
		})
	}
}

func TestAResourceThatIsNotCachedNeedsNoBudget(t *testing.T) {
	for name, fallback := range map[string]Fallback{"FallbackPaced": FallbackPaced, "FallbackNever": FallbackNever} {
		t.Run(name, func(t *testing.T) {
			pair := attached(t, setting{options: Options{Fallback: fallback, Budget: Budget{Clients: 3000, StartsPerSecond: 1}}})
			pair.kubefan.on(says(http.StatusNotFound, "not cached", own))
			pair.expect(resume, "200 apiserver")
			pair.expect(resume, "200 apiserver")
			pair.expect(sharded, "404 not cached")
			pair.wereAsked([]string{"GET " + resume, "GET " + sharded}, []string{"GET " + resume, "GET " + resume})
		})
	}
}

func TestOnlyTheFirstReadThatKubefanRefusesNeedsTheBudget(t *testing.T) {
	for name, status := range map[string]int{"a certificate": http.StatusUnauthorized, "nobody's 404": http.StatusNotFound} {
		t.Run(name, func(t *testing.T) {
			pair := attached(t, setting{options: Options{Budget: Budget{Clients: 60, StartsPerSecond: 1}}})
			pair.kubefan.on(says(status, name))
			for range 4 {
				pair.expect(list, "200 apiserver")
			}
			pair.wereAsked([]string{"GET " + list}, slices.Repeat([]string{"GET " + list}, 4))
			gate := pair.shared().gate
			gate.mu.Lock()
			defer gate.mu.Unlock()
			if gate.next.Sub(pair.clock.Now()) != time.Minute {
				t.Error("the first one took no start of the budget", gate.next)
			}
		})
	}
}

func TestARefusalOfKubefanCountsIfReadsNeverFallBack(t *testing.T) {
	pair := attached(t, setting{options: Options{Fallback: FallbackNever}})
	pair.kubefan.on(says(http.StatusForbidden, "refused"))
	pair.expect(list, "403 refused")
	pair.wereAsked([]string{"GET " + list}, nil)
}

func TestAnAnswerOfTheCacheOrTheApiserverCounts(t *testing.T) {
	pair := attached(t, setting{})
	for status, header := range map[int]string{
		http.StatusGone: hit, http.StatusNotFound: hit, http.StatusBadRequest: hit,
		http.StatusGatewayTimeout: "Content-Type: application/json",
		http.StatusForbidden:      "X-Kubernetes-Pf-Flowschema-Uid: 1", http.StatusServiceUnavailable: "Cache-Status: kubefan; fwd=bypass",
	} {
		pair.kubefan.on(says(status, "answer", header))
		pair.expect(list, fmt.Sprint(status, " answer"))
	}
	if asked := pair.apiserver.asked(); len(asked) > 0 || len(pair.logged.all()) > 0 {
		t.Error(asked, pair.logged.all())
	}
}

func TestReadsMoveAndReturnWithOneLineEach(t *testing.T) {
	for name, gone := range map[string]http.HandlerFunc{
		"no answer": nil,
		"5xx":       says(http.StatusServiceUnavailable, "draining", hit),
		"a proxy":   says(http.StatusBadGateway, "<html>"),
	} {
		t.Run(name, func(t *testing.T) {
			pair := attached(t, setting{})
			pair.kubefan.on(gone)
			pair.kubefan.hasHealth(nil)
			pair.expect(list, "200 apiserver")
			pair.expect(watch, "200 apiserver")
			pair.expect(resume, "200 apiserver")
			pair.clock.advance(time.Minute)
			pair.expect(list, "200 apiserver")
			pair.kubefan.on(says(http.StatusOK, "kubefan", hit))
			pair.clock.advance(fallback.HoldMin)
			pair.expect(list, "200 apiserver")
			pair.clock.advance(2 * fallback.ProbeEvery)
			pair.expect(list, "200 kubefan")
			lines := pair.logged.all()
			if len(lines) != 2 || !strings.Contains(lines[0], "kubefan is away: reads go to the apiserver") ||
				!strings.Contains(lines[1], "Reads return to kubefan") {
				t.Error(lines)
			}
		})
	}
}

func TestReadsReturnAtOnceWhileTheApiserverIsAwayToo(t *testing.T) {
	for name, away := range map[string]http.HandlerFunc{"no answer": nil, "a proxy": says(http.StatusBadGateway, "<html>")} {
		t.Run(name, func(t *testing.T) {
			pair := attached(t, setting{})
			pair.kubefan.on(nil)
			pair.apiserver.on(away)
			for _, path := range []string{list, watch} {
				response, err := pair.do(t.Context(), http.MethodGet, path)
				if err == nil {
					_ = response.Body.Close()
				}
				if (err == nil) != (away != nil) {
					t.Error(path, err)
				}
			}
			pair.kubefan.on(says(http.StatusOK, "kubefan", hit))
			pair.clock.advance(2 * fallback.ProbeEvery)
			pair.expect(list, "200 kubefan")
		})
	}
}

func TestA5xxOfAKubefanThatServesConcernsOneRead(t *testing.T) {
	for name, header := range map[string]string{
		"of nobody in particular": "Retry-After: 1", "of kubefan": own, "of the cache": hit,
	} {
		t.Run(name, func(t *testing.T) {
			pair := attached(t, setting{})
			pair.kubefan.on(func(writer http.ResponseWriter, request *http.Request) {
				if request.URL.Path == latest {
					says(http.StatusServiceUnavailable, "the apiserver is away", header)(writer, request)
					return
				}
				says(http.StatusOK, "kubefan", hit)(writer, request)
			})
			pair.expect(list, "200 apiserver")
			pair.expect(nodes, "200 kubefan")
			pair.expect(list, "200 apiserver")
			pair.apiserver.on(watches("event"))
			moved, err := pair.do(t.Context(), http.MethodGet, watch)
			if err != nil {
				t.Fatal(err)
			}
			defer moved.Body.Close()
			if got := firstLine(t, moved.Body); got != "event" {
				t.Error(got)
			}
			pair.clock.advance(directWatchesEndWithin)
			if rest, err := io.ReadAll(moved.Body); err != nil || len(rest) > 0 {
				t.Error("kubefan is not asked again", rest, err)
			}
			if lines := pair.logged.all(); len(lines) > 0 {
				t.Error("it is no outage", lines)
			}
		})
	}
}

func TestA5xxOfAKubefanThatServesCountsIfReadsNeverFallBack(t *testing.T) {
	pair := attached(t, setting{options: Options{Fallback: FallbackNever}})
	pair.kubefan.on(says(http.StatusServiceUnavailable, "the apiserver is away"))
	pair.expect(list, "503 the apiserver is away")
	pair.expect(sharded, "503 the apiserver is away")
	pair.kubefan.on(says(http.StatusOK, "kubefan", hit))
	pair.expect(list, "200 kubefan")
}

func TestAnAnswerOfSomethingInThePlaceOfKubefanIsAnOutage(t *testing.T) {
	for _, status := range []int{http.StatusNotFound, http.StatusForbidden, http.StatusUnauthorized} {
		t.Run(http.StatusText(status), func(t *testing.T) {
			pair := attached(t, setting{})
			pair.kubefan.on(says(status, "no such route"))
			pair.kubefan.hasHealth([]byte("no such route"))
			pair.expect(list, "200 apiserver")
			pair.expect(list, "200 apiserver")
			pair.wereAsked([]string{"GET " + list}, []string{"GET " + list, "GET " + list})
			if lines := pair.logged.all(); len(lines) != 1 || !strings.Contains(lines[0], "kubefan is away") {
				t.Error(lines)
			}
		})
	}
}

func TestAKubefanThatEndedIsNoticedByTheNextRead(t *testing.T) {
	pair := attached(t, setting{})
	pair.expect(list, "200 kubefan")
	pair.kubefan.CloseClientConnections()
	pair.kubefan.Close()
	pair.expect(list, "200 apiserver")
}

func TestAConnectionThatBreaksIsReplaced(t *testing.T) {
	pair := attached(t, setting{})
	count := atomic.Int32{}
	pair.kubefan.on(func(writer http.ResponseWriter, request *http.Request) {
		if count.Add(1) < attemptsMax {
			panic(http.ErrAbortHandler)
		}
		says(http.StatusOK, "kubefan", hit)(writer, request)
	})
	pair.expect(list, "200 kubefan")
	if lines := pair.logged.all(); len(lines) > 0 {
		t.Error(lines)
	}
}

func TestAnotherReplicaIsAskedAfterOneThatCannotBeReached(t *testing.T) {
	refused, reach := atomic.Int32{}, &net.Dialer{}
	pair := attached(t, setting{config: func(config *rest.Config) {
		config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			if !strings.HasSuffix(config.Host, address) && refused.Add(1) < attemptsMax {
				return nil, &net.OpError{Op: "dial", Err: context.DeadlineExceeded}
			}
			return reach.DialContext(ctx, network, address)
		}
	}})
	pair.expect(list, "200 kubefan")
	if lines := pair.logged.all(); len(lines) > 0 || refused.Load() != attemptsMax {
		t.Error(lines, refused.Load())
	}
}

func TestAnotherReplicaIsAskedAfterOneThatDrains(t *testing.T) {
	pair := attached(t, setting{})
	count := atomic.Int32{}
	pair.kubefan.on(func(writer http.ResponseWriter, request *http.Request) {
		if count.Add(1) == 1 {
			writer.Header().Set("Connection", "close")
			says(http.StatusServiceUnavailable, "draining", hit)(writer, request)
			return
		}
		says(http.StatusOK, "kubefan", hit)(writer, request)
	})
	pair.expect(list, "200 kubefan")
	if lines := pair.logged.all(); len(lines) > 0 {
		t.Error(lines)
	}
}

func TestAKubefanThatDoesNotAnswerIsLeftAfterTheTimeoutIfItDoesNotServe(t *testing.T) {
	for name, health := range map[string][]byte{"it serves": healthServing, "it does not": nil} {
		t.Run(name, func(t *testing.T) {
			pair := attached(t, setting{})
			arrived := make(chan struct{})
			pair.kubefan.on(func(_ http.ResponseWriter, request *http.Request) {
				close(arrived)
				<-request.Context().Done()
			})
			pair.kubefan.hasHealth(health)
			read := make(chan string)
			go func() { read <- pair.read(list) }()
			<-arrived
			pair.clock.advance(defaultTimeouts.answer)
			if got := <-read; got != "200 apiserver" {
				t.Error(got)
			}
			if asked := pair.kubefan.asked(); len(asked) != 1 {
				t.Error("a hang is not tried again", asked)
			}
			if lines := pair.logged.all(); (len(lines) == 0) != (health != nil) {
				t.Error(lines)
			}
		})
	}
}

func TestACallerThatGivesUpIsNoOutage(t *testing.T) {
	pair := attached(t, setting{})
	arrived := make(chan struct{})
	pair.kubefan.on(func(_ http.ResponseWriter, request *http.Request) {
		close(arrived)
		<-request.Context().Done()
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-arrived
		cancel()
	}()
	if _, err := pair.do(ctx, http.MethodGet, list); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	pair.kubefan.on(says(http.StatusOK, "kubefan", hit))
	pair.expect(list, "200 kubefan")
	pair.wereAsked([]string{"GET " + list, "GET " + list}, nil)
}

func TestBusyForSomeSecondsIsAnAnswerAndForLongerNone(t *testing.T) {
	pair := attached(t, setting{})
	pair.kubefan.on(says(http.StatusTooManyRequests, "busy", "Retry-After: 1"))
	pair.expect(list, "429 busy")
	pair.clock.advance(fallback.BusyMax - 1)
	pair.expect(list, "429 busy")
	pair.clock.advance(1)
	pair.expect(list, "200 apiserver")
	// kubefan serves, and another cache of it may be ready.
	pair.expect(nodes, "429 busy")
	pair.kubefan.on(says(http.StatusOK, "kubefan", hit))
	pair.expect(list, "200 kubefan")
	if lines := pair.logged.all(); len(lines) > 0 {
		t.Error("it is no outage", lines)
	}
	pair.kubefan.on(says(http.StatusTooManyRequests, "busy", "Retry-After: 1"))
	pair.kubefan.hasHealth(nil)
	pair.expect(list, "429 busy")
	pair.clock.advance(fallback.BusyMax)
	pair.expect(list, "200 apiserver")
	if lines := pair.logged.all(); len(lines) != 1 || !strings.Contains(lines[0], "kubefan is away") {
		t.Error("its health says that it does not serve", lines)
	}
}

func TestReadsThatWaitReturnWithKubefan(t *testing.T) {
	for name, with := range map[string]struct {
		setting setting
		path    string
	}{
		"FallbackNever":           {setting{options: Options{Fallback: FallbackNever}}, list},
		"a part of a collection":  {setting{}, sharded},
		"a window that is longer": {setting{options: Options{Budget: Budget{Clients: 3000, StartsPerSecond: 1}}}, resume},
	} {
		t.Run(name, func(t *testing.T) {
			pair := attached(t, with.setting)
			pair.kubefan.on(nil)
			read := make(chan string)
			go func() { read <- pair.read(with.path) }()
			// The timers of the attempts, and of the probe.
			for range attemptsMax + 1 {
				<-pair.clock.armed
			}
			pair.clock.advance(2 * fallback.ProbeEvery)
			pair.kubefan.on(says(http.StatusOK, "kubefan", hit))
			pair.clock.advance(2 * fallback.ProbeEvery)
			if got := <-read; got != "200 kubefan" {
				t.Error(got)
			}
			if asked := pair.apiserver.asked(); len(asked) > 0 {
				t.Error(asked)
			}
		})
	}
}

func TestAReadThatWaitsEndsWithItsContext(t *testing.T) {
	for name, fallback := range map[string]Fallback{"FallbackPaced": FallbackPaced, "FallbackNever": FallbackNever} {
		t.Run(name, func(t *testing.T) {
			pair := attached(t, setting{options: Options{Fallback: fallback, Budget: Budget{Clients: 3000, StartsPerSecond: 1}}})
			pair.kubefan.on(nil)
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				for range attemptsMax + 1 {
					<-pair.clock.armed
				}
				cancel()
			}()
			if _, err := pair.do(ctx, http.MethodGet, resume); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
	}
}

func TestABudgetInAnAnswerOfTheCacheReplacesThatOfTheOptions(t *testing.T) {
	pair := attached(t, setting{})
	answer := func(budget string, headers ...string) {
		pair.kubefan.on(says(http.StatusOK, "kubefan", append(headers, "Kubefan-Fallback: "+budget)...))
		pair.expect(list, "200 kubefan")
	}
	answer("clients=60, rate=1", hit)
	answer("clients=1, rate=1000000", "Cache-Status: kubefan; fwd=bypass")
	answer("clients=1, rate=1000000")
	if got := pair.shared().gate.budget.window(); got != time.Minute {
		t.Error(got)
	}
}

func TestAWatchOfKubefanThatBreaksEndsSoThatClientGoResumes(t *testing.T) {
	for _, speaks := range []protocol{http1, http2, plain} {
		t.Run(string(speaks), func(t *testing.T) {
			pair := attached(t, setting{speaks: speaks})
			response := begunWatch(t, pair)
			defer response.Body.Close()
			pair.kubefan.CloseClientConnections()
			if _, err := response.Body.Read(make([]byte, 1)); err != io.ErrUnexpectedEOF {
				t.Error(err)
			}
		})
	}
}

func TestAWatchThatItsCallerEndsHasItsError(t *testing.T) {
	pair := attached(t, setting{})
	pair.kubefan.on(watches("event", hit))
	ctx, cancel := context.WithCancel(t.Context())
	response, err := pair.do(ctx, http.MethodGet, watch)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	cancel()
	if _, err := io.ReadAll(response.Body); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestWatchesAtTheApiserverEndAfterTheReturn(t *testing.T) {
	pair := attached(t, setting{})
	pair.kubefan.on(nil)
	pair.apiserver.on(watches("event"))
	open := func(path string) *http.Response {
		response, err := pair.do(t.Context(), http.MethodGet, path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = response.Body.Close() })
		if got := firstLine(t, response.Body); got != "event" {
			t.Error(got)
		}
		return response
	}
	moved := open(watch)
	// It waits for as long as it likes, and kubefan is still probed.
	pair.clock.advance(2 * unusedMax)
	pair.kubefan.on(says(http.StatusOK, "passed on"))
	pair.clock.advance(fallback.HoldMin + 2*fallback.ProbeEvery)
	pair.clock.advance(directWatchesEndWithin)
	if rest, err := io.ReadAll(moved.Body); err != nil || len(rest) > 0 {
		t.Error("it does not end like a watch whose time is up: ", rest, err)
	}
	if open := pair.shared().direct.all(); len(open) != 1 {
		t.Error(len(open), "are open")
	}
	_ = moved.Body.Close()
	if open := pair.shared().direct.all(); len(open) != 0 {
		t.Error(len(open), "are open")
	}
	pair.expect(watch, "200 passed on")
}

func TestAWatchThatKubefanDoesNotAnswerStays(t *testing.T) {
	for name, status := range map[string]int{"not cached": http.StatusNotFound, "refused": http.StatusForbidden} {
		t.Run(name, func(t *testing.T) {
			pair := attached(t, setting{})
			pair.kubefan.on(says(status, name))
			pair.apiserver.on(watches("event"))
			for range 2 {
				response, err := pair.do(t.Context(), http.MethodGet, watch)
				if err != nil {
					t.Fatal(err)
				}
				defer response.Body.Close()
				if open := pair.shared().direct.all(); len(open) != 0 {
					t.Error("it would be ended")
				}
			}
		})
	}
}

func TestALogSinkMayReadThroughTheSameClient(t *testing.T) {
	pair := attached(t, setting{})
	read := ""
	pair.shared().monitor.logger = funcr.New(func(string, string) { read = pair.read(latest) + ", " + pair.read(list) }, funcr.Options{})
	pair.kubefan.on(nil)
	pair.expect(list, "200 apiserver")
	if read != "200 apiserver, 200 apiserver" {
		t.Error(read)
	}
}

func TestAKubefanThatNobodyNeedsIsNotProbed(t *testing.T) {
	pair := attached(t, setting{})
	pair.kubefan.on(nil)
	pair.expect(list, "200 apiserver")
	pair.clock.advance(unusedMax + 2*fallback.ProbeEvery)
	if pending := pair.clock.count(); pending != 0 {
		t.Error(pending, "timers")
	}
	// The next read finds out that it is back.
	pair.kubefan.on(says(http.StatusOK, "kubefan", hit))
	pair.expect(list, "200 apiserver")
	pair.clock.advance(fallback.HoldMin + 2*fallback.ProbeEvery)
	pair.expect(list, "200 kubefan")
}

func TestAProbeAsksForTheHealth(t *testing.T) {
	for _, speaks := range []protocol{http1, http2, plain} {
		t.Run(string(speaks), func(t *testing.T) {
			pair := attached(t, setting{speaks: speaks})
			probe := func() bool {
				ctx, cancel := context.WithTimeout(t.Context(), waitAtMost)
				defer cancel()
				return pair.shared().connection.probe(ctx)
			}
			if !probe() {
				t.Error("it is healthy")
			}
			pair.kubefan.hasHealth(slices.Concat(healthServing[:6], []byte{2}))
			if isHealthy := probe(); isHealthy != (speaks == http1) {
				t.Error("over HTTP/1.1 no gRPC answers: ", isHealthy)
			}
			pair.kubefan.on(nil)
			if probe() {
				t.Error("it is gone")
			}
		})
	}
}

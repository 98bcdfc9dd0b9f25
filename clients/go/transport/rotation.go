package transport

import (
	"bytes"
	"crypto/tls"
	"sync"
	"time"
)

// rotationCheckedEvery is how long connections with an old client certificate are used.
const rotationCheckedEvery = time.Minute

// rotation closes the connections when the file of the client certificate has another one, as
// client-go does: a server may refuse what an old connection asks.
type rotation struct {
	certificate func(*tls.CertificateRequestInfo) (*tls.Certificate, error)
	closeAll    func()

	mu        sync.Mutex
	checkedAt time.Time
	last      []byte
}

// check compares the certificate with that of the last check. A nil rotation has none.
func (r *rotation) check(now time.Time) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if now.Sub(r.checkedAt) < rotationCheckedEvery {
		return
	}
	r.checkedAt = now
	found, err := r.certificate(nil)
	if err != nil || len(found.Certificate) == 0 {
		return
	}
	if r.last != nil && !bytes.Equal(r.last, found.Certificate[0]) {
		r.closeAll()
	}
	r.last = found.Certificate[0]
}

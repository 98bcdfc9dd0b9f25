package kubefan

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"
)

// tokenReadInterval is how long a token is used before its file is read again. The kubelet renews a
// projected token at 80 % of its life, so this is early enough.
const tokenReadInterval = 10 * time.Second

// token is a bearer token, fixed or in a file. It is never part of an error.
type token struct {
	file string

	mu     sync.Mutex
	header string
	// readAt is the time of the last read; zero if the token no longer counts.
	readAt time.Time
	now    func() time.Time
}

func newToken(fixed, file string) (*token, error) {
	made := &token{file: file, now: time.Now}
	if file == "" && fixed != "" {
		header, err := bearer(fixed)
		if err != nil {
			return nil, err
		}
		made.header = header
	}
	return made, nil
}

// value returns the "authorization" of the next call; empty without a token. If the file can no
// longer be read, the last token stays in use, because some setups delete the file.
func (t *token) value() (string, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.file == "" || !t.readAt.IsZero() && t.now().Sub(t.readAt) < tokenReadInterval {
		return t.header, nil
	}
	header, err := t.read()
	if err != nil && t.header == "" {
		return "", err
	}
	if err == nil {
		t.header = header
	}
	t.readAt = t.now()
	return t.header, nil
}

// replacement reads the file again after the server refused a token, and tells whether there is
// another one now.
func (t *token) replacement(refused string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.file == "" {
		return false
	}
	header, err := t.read()
	if err != nil {
		return false
	}
	t.header, t.readAt = header, t.now()
	return header != refused
}

// expire makes the next call read the file again, unless another call has done so.
func (t *token) expire(sent string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.file != "" && t.header == sent {
		t.readAt = time.Time{}
	}
}

func (t *token) mayChange() bool { return t.file != "" }

func (t *token) read() (string, error) {
	text, err := os.ReadFile(t.file)
	if err != nil {
		return "", fmt.Errorf("token file: %w", err)
	}
	header, err := bearer(string(text))
	if err != nil {
		return "", fmt.Errorf("token file %s: %w", t.file, err)
	}
	return header, nil
}

func bearer(text string) (string, error) {
	text = strings.TrimSpace(text)
	if text == "" {
		return "", errors.New("the token is empty")
	}
	for _, char := range []byte(text) {
		if char <= ' ' || char > '~' {
			return "", errors.New("the token has characters that a header cannot contain")
		}
	}
	return "Bearer " + text, nil
}

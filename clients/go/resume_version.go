package kubefan

import "strings"

// versionEnd is the place after all events of a version, in a text. On the wire a field says so.
const versionEnd = ".end"

// receivedVersion is the text of a version that was received, to resume from.
func receivedVersion(version string, isComplete bool) string {
	if isComplete && version != "" {
		return version + versionEnd
	}
	return version
}

// sentVersion returns a version as it is sent, and whether all events of it were received; nil
// without a version.
func sentVersion(text string) (version string, isComplete *bool) {
	version, found := strings.CutSuffix(text, versionEnd)
	if text == "" {
		return "", nil
	}
	return version, &found
}

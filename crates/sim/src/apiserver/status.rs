//! The Status object: kube-apiserver's error responses, to the byte.

use std::fmt::Write as _;

use serde::Serialize;

/// A `v1.Status`, serialized with its fields in kube-apiserver's order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Status {
    kind: &'static str,
    #[serde(rename = "apiVersion")]
    api_version: &'static str,
    metadata: ListMeta,
    status: &'static str,
    /// The message for people.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// The machine-readable reason, such as `NotFound`. Empty if kube-apiserver sends none.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub reason: &'static str,
    /// The object concerned, and the causes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<Box<Details>>,
    /// The HTTP status code. 0 in a success, which omits the field.
    #[serde(skip_serializing_if = "is_zero")]
    pub code: u16,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
struct ListMeta {
    #[serde(rename = "continue", skip_serializing_if = "str::is_empty")]
    continue_token: Box<str>,
}

/// `v1.StatusDetails`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Details {
    /// The object's name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The resource's group.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub group: String,
    /// The resource's plural name, or the kind.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kind: String,
    /// The object's uid.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uid: String,
    /// One entry per invalid field.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub causes: Vec<Cause>,
    /// Seconds to wait before a retry. The response also has it as the `Retry-After` header.
    #[serde(skip_serializing_if = "is_zero")]
    pub retry_after_seconds: u16,
}

/// `v1.StatusCause`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cause {
    /// Machine-readable reason, such as `FieldValueInvalid`.
    pub reason: &'static str,
    /// The message for people.
    pub message: String,
    /// Path of the invalid field.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub field: &'static str,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_zero(number: &u16) -> bool {
    *number == 0
}

impl Status {
    /// Returns a failure without details.
    pub fn failure(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            kind: "Status",
            api_version: "v1",
            metadata: ListMeta::default(),
            status: "Failure",
            message: message.into(),
            reason,
            details: None,
            code,
        }
    }

    /// Adds details.
    #[must_use]
    pub fn with_details(mut self, details: Details) -> Self {
        self.details = Some(Box::new(details));
        self
    }

    /// 400.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::failure(400, "BadRequest", message)
    }

    /// 500 without a reason: kube-apiserver's response to errors that are not API errors.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::failure(500, "", message)
    }

    /// 404 for an object.
    pub fn not_found(group: &str, resource: &str, name: &str) -> Self {
        let message = format!("{} \"{name}\" not found", qualified(group, resource));
        Self::failure(404, "NotFound", message).with_details(about(group, resource, name))
    }

    /// 404 for a resource that does not exist in a known group.
    pub fn no_such_resource() -> Self {
        Self::failure(404, "NotFound", "the server could not find the requested resource")
            .with_details(Details::default())
    }

    /// 405.
    pub fn method_not_allowed() -> Self {
        Self::failure(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
            .with_details(Details::default())
    }

    /// 406. Lists and watches have different texts.
    pub fn not_acceptable(watch: bool) -> Self {
        let message = if watch {
            "only the following media types are accepted: application/json;stream=watch"
        } else {
            "only the following media types are accepted: application/json"
        };
        Self::failure(406, "NotAcceptable", message)
    }

    /// 409 for a create.
    pub fn already_exists(group: &str, resource: &str, name: &str) -> Self {
        let message = format!("{} \"{name}\" already exists", qualified(group, resource));
        Self::failure(409, "AlreadyExists", message).with_details(about(group, resource, name))
    }

    /// 409 for an update.
    pub fn conflict(group: &str, resource: &str, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {} \"{name}\": {why}", qualified(group, resource));
        Self::failure(409, "Conflict", message).with_details(about(group, resource, name))
    }

    /// 410: the resource version is too old.
    pub fn expired(message: impl Into<String>) -> Self {
        Self::failure(410, "Expired", message)
    }

    /// 410 in the middle of a paged list, with a token that continues at the latest state.
    pub fn expired_continue(token: String) -> Self {
        let mut status = Self::expired(
            "The provided continue parameter is too old to display a consistent list result. You can start a new list \
             without the continue parameter, or use the continue token in this response to retrieve the remainder of the \
             results. Continuing with the provided token results in an inconsistent list - objects that were created, \
             modified, or deleted between the time the first chunk was returned and now may show up in the list.",
        );
        status.metadata.continue_token = token.into();
        status
    }

    /// 422. Each cause has a field, a reason and a message.
    pub fn invalid(group: &str, kind: &str, name: &str, causes: Vec<Cause>) -> Self {
        let faults: Vec<String> = causes.iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect();
        let mut message = format!("{} \"{name}\" is invalid: ", qualified(group, kind));
        match &*faults {
            [fault] => message.push_str(fault),
            faults => {
                // Writing to a String cannot fail.
                let _ = write!(message, "[{}]", faults.join(", "));
            }
        }
        let details = Details { causes, ..about(group, kind, name) };
        Self::failure(422, "Invalid", message).with_details(details)
    }

    /// 504: the resource version did not exist within the waiting time.
    pub fn too_large_version(requested: u64, current: u64) -> Self {
        let message = format!("Timeout: Too large resource version: {requested}, current: {current}");
        let cause =
            Cause { reason: "ResourceVersionTooLarge", message: "Too large resource version".into(), field: "" };
        let details = Details { causes: vec![cause], retry_after_seconds: 1, ..Details::default() };
        Self::failure(504, "Timeout", message).with_details(details)
    }

    /// 429 as a Status.
    pub fn too_many_requests(message: impl Into<String>, retry_after_seconds: u16) -> Self {
        let details = Details { retry_after_seconds, ..Details::default() };
        Self::failure(429, "TooManyRequests", message).with_details(details)
    }

    /// 200 for a delete that does not return the object.
    pub fn deleted(group: &str, resource: &str, name: &str, uid: &str) -> Self {
        let details = Details { uid: uid.to_owned(), ..about(group, resource, name) };
        Self { status: "Success", ..Self::failure(0, "", "") }.with_details(details)
    }

    /// The HTTP status.
    pub fn http_code(&self) -> u16 {
        if self.code == 0 { 200 } else { self.code }
    }
}

fn qualified(group: &str, resource: &str) -> String {
    if group.is_empty() { resource.to_owned() } else { format!("{resource}.{group}") }
}

fn about(group: &str, resource: &str, name: &str) -> Details {
    Details { name: name.to_owned(), group: group.to_owned(), kind: resource.to_owned(), ..Details::default() }
}

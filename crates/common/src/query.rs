//! Queries of requests to the Kubernetes API.

/// Encodes a query, such as `?limit=500&labelSelector=a%3Db`. Pairs without a value are left out:
/// to the apiserver they are the same as none. Empty without pairs.
pub fn encode_query<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let pairs = pairs.into_iter().filter(|(_, value)| !value.is_empty());
    let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish();
    if query.is_empty() { query } else { format!("?{query}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_escaped_and_empty_ones_are_left_out() {
        let query = [("limit", "5"), ("labelSelector", "a=b,c"), ("fieldSelector", ""), ("continue", "x y")];
        assert_eq!(encode_query(query), "?limit=5&labelSelector=a%3Db%2Cc&continue=x+y");
        assert_eq!(encode_query([("limit", "")]), "");
    }
}

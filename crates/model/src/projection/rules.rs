//! The rules of a projection: a tree of names.

/// The overhead of an allocation, in bytes: an estimate.
const ALLOCATION_BYTES: usize = 16;

/// The rules for the fields of a map.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Node {
    /// Sorted by name.
    pub(super) fields: Vec<(Box<str>, Rule)>,
    /// Whether fields without a rule are kept. A field mask leaves them out.
    pub(super) keeps_others: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Rule {
    Keep,
    Drop,
    Within(Node),
}

impl Node {
    pub(super) fn keep(&mut self, path: &[String]) {
        let Some((first, rest)) = path.split_first() else { return };
        let at = self.find(first).unwrap_or_else(|at| {
            self.fields
                .insert(at, (first.as_str().into(), Rule::Within(Self { fields: Vec::new(), keeps_others: false })));
            at
        });
        match &mut self.fields[at].1 {
            rule if rest.is_empty() => *rule = Rule::Keep,
            Rule::Within(node) => node.keep(rest),
            Rule::Keep | Rule::Drop => {}
        }
    }

    /// Gives back the memory that was allocated for more fields. A view keeps its mask for hours.
    pub(super) fn shrink(&mut self) {
        self.fields.shrink_to_fit();
        for (_, rule) in &mut self.fields {
            if let Rule::Within(node) = rule {
                node.shrink();
            }
        }
    }

    pub(super) fn heap_bytes(&self) -> usize {
        let field = |(name, rule): &(Box<str>, Rule)| {
            let within = if let Rule::Within(node) = rule { node.heap_bytes() } else { 0 };
            size_of::<(Box<str>, Rule)>() + name.len() + within
        };
        self.fields.iter().map(field).sum::<usize>() + ALLOCATION_BYTES * (1 + self.fields.len())
    }

    pub(super) fn find(&self, name: &str) -> Result<usize, usize> {
        self.fields.binary_search_by(|(known, _)| (**known).cmp(name))
    }

    pub(super) fn rule(&self, name: &str) -> &Rule {
        match self.find(name) {
            Ok(at) => &self.fields[at].1,
            Err(_) if self.keeps_others => &Rule::Keep,
            Err(_) => &Rule::Drop,
        }
    }
}

impl Rule {
    pub(super) fn leave_out(&mut self, path: &[&str]) {
        let Some((first, rest)) = path.split_first() else {
            *self = Self::Drop;
            return;
        };
        if *self == Self::Keep {
            *self = Self::Within(Node { fields: Vec::new(), keeps_others: true });
        }
        let Self::Within(node) = self else { return };
        match node.find(first) {
            Ok(at) => node.fields[at].1.leave_out(rest),
            Err(at) if node.keeps_others => {
                let mut rule = Self::Keep;
                rule.leave_out(rest);
                node.fields.insert(at, ((*first).into(), rule));
            }
            // This field is left out already.
            Err(_) => {}
        }
    }
}

//! Permissions: an action on the queues that a pattern names, written `ACTION@PATTERN`.

use std::fmt;

/// What can be done with a queue. Each action stands by itself; [`Action::Admin`] alone contains all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Put items into the queue.
    Produce,
    /// Take items, settle them, and read their payloads.
    Consume,
    /// Read settings, figures, and items without their payloads.
    View,
    /// Change settings, and purge, redrive, replay, delete and schedule items.
    Manage,
    /// Create the queue.
    Create,
    /// Everything.
    Admin,
}

impl Action {
    /// All actions.
    pub const ALL: [Self; 6] =
        [Self::Produce, Self::Consume, Self::View, Self::Manage, Self::Create, Self::Admin];

    /// Returns the name of the action in permissions.
    pub fn name(self) -> &'static str {
        match self {
            Self::Produce => "produce",
            Self::Consume => "consume",
            Self::View => "view",
            Self::Manage => "manage",
            Self::Create => "create",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name in which `*` stands for any number of any characters.
#[derive(Clone, PartialEq, Eq)]
pub struct Pattern(Box<str>);

impl Pattern {
    /// Returns the pattern that this text is.
    pub fn new(text: &str) -> Self {
        Self(text.into())
    }

    /// Returns true if the pattern matches every name.
    pub fn is_everything(&self) -> bool {
        self.0.bytes().all(|byte| byte == b'*') && !self.0.is_empty()
    }

    /// Returns true if the name is one of those that the pattern stands for. Takes time in proportion to the product of both
    /// lengths at most.
    pub fn matches(&self, name: &str) -> bool {
        let (pattern, name) = (self.0.as_bytes(), name.as_bytes());
        let (mut at, mut in_name) = (0, 0);
        // The last `*`, and where the name goes on after what this `*` stands for.
        let mut star: Option<(usize, usize)> = None;
        while in_name < name.len() {
            match pattern.get(at) {
                Some(b'*') => {
                    star = Some((at, in_name));
                    at += 1;
                }
                Some(byte) if *byte == name[in_name] => {
                    at += 1;
                    in_name += 1;
                }
                _ => {
                    let Some((star_at, covered)) = star else { return false };
                    star = Some((star_at, covered + 1));
                    at = star_at + 1;
                    in_name = covered + 1;
                }
            }
        }
        pattern[at..].iter().all(|byte| *byte == b'*')
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// An action on some queues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permission {
    action: Action,
    queues: Pattern,
}

impl Permission {
    /// Parses `ACTION@PATTERN`. The error says what would be right.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = |what: &str| {
            format!("{text:?} {what}: write ACTION@QUEUES, for example produce@orders.* or view@*")
        };
        let (action, queues) = text.split_once('@').ok_or_else(|| wrong("is not a permission"))?;
        let action =
            Action::ALL.into_iter().find(|known| known.name() == action).ok_or_else(|| {
                let known = Action::ALL.map(Action::name).join(", ");
                format!("{action:?} is not an action: there are {known}")
            })?;
        let may_stand =
            |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'*');
        if !(1..=128).contains(&queues.len()) || !queues.bytes().all(may_stand) {
            return Err(wrong("does not name queues"));
        }
        Ok(Self { action, queues: Pattern::new(queues) })
    }

    /// Returns true if this permission covers the action on the queue.
    pub fn allows(&self, action: Action, queue: &str) -> bool {
        self.covers(action) && self.queues.matches(queue)
    }

    /// Returns true if this permission covers the action on every queue there is or will be.
    pub fn allows_everywhere(&self, action: Action) -> bool {
        self.covers(action) && self.queues.is_everything()
    }

    /// Returns true if this permission covers the action on some queues.
    pub fn covers(&self, action: Action) -> bool {
        self.action == action || self.action == Action::Admin
    }
}

impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.action, self.queues)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_part_of_a_name() {
        for (pattern, matching, others) in [
            ("orders", &["orders"][..], &["order", "orders2", "", "Orders"][..]),
            ("*", &["orders", "a", ""], &[]),
            ("orders.*", &["orders.", "orders.eu", "orders.eu.dead"], &["orders", "xorders.eu"]),
            ("*.dead", &["a.dead", ".dead", "a.dead.dead"], &["dead", "a.dead2"]),
            ("a*b*c", &["abc", "axxbyyc", "abbcc", "abcbc"], &["ab", "acb", "abcd"]),
            ("**", &["", "x"], &[]),
        ] {
            let pattern = Pattern::new(pattern);
            for name in matching {
                assert!(pattern.matches(name), "{pattern} {name}");
            }
            for name in others {
                assert!(!pattern.matches(name), "{pattern} {name}");
            }
        }
    }

    /// A pattern full of stars does not take time that grows with the number of ways to match.
    #[test]
    fn many_stars_take_no_time() {
        let pattern = Pattern::new(&"a*".repeat(64));
        assert!(!pattern.matches(&format!("{}b", "a".repeat(63))));
    }

    #[test]
    fn a_permission_is_one_action_on_the_queues_of_a_pattern() {
        let permission = Permission::parse("produce@orders.*").unwrap();
        assert!(permission.allows(Action::Produce, "orders.eu"));
        assert!(!permission.allows(Action::Produce, "mail"));
        for other in Action::ALL.into_iter().filter(|action| *action != Action::Produce) {
            assert!(!permission.allows(other, "orders.eu"), "{other}");
        }
        assert_eq!(permission.to_string(), "produce@orders.*");
        let admin = Permission::parse("admin@*").unwrap();
        assert!(Action::ALL.into_iter().all(|action| admin.allows_everywhere(action)));
        assert!(!permission.allows_everywhere(Action::Produce));
    }

    #[test]
    fn what_is_no_permission_is_refused_with_what_would_be_right() {
        for (text, expected) in [
            ("produce", "write ACTION@QUEUES"),
            ("boss@*", "there are produce, consume, view, manage, create, admin"),
            ("produce@", "does not name queues"),
            ("produce@a b", "does not name queues"),
            ("produce@a,b", "does not name queues"),
            ("@*", "is not an action"),
        ] {
            let error = Permission::parse(text).unwrap_err();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }
}

//! Permissions: an action on the queues that a pattern names, written `ACTION@PATTERN`.

use std::fmt;

use super::Pattern;

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
        let queues = Pattern::of_queues(queues).ok_or_else(|| wrong("does not name queues"))?;
        Ok(Self { action, queues })
    }

    /// Returns true if this permission covers the action on the queue. For a pattern in place of a queue: on all queues that the
    /// pattern stands for.
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

//! Bearer tokens.

use std::fmt;

use super::values::Parsed;

/// What a token lets its bearer do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Push.
    Produce,
    /// Take and settle.
    Consume,
    /// Everything.
    Admin,
}

/// A bearer token. Its debug form does not show it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Token {
    /// The name of the bearer, for logs.
    pub name: String,
    /// What the bearer shows.
    pub secret: String,
    /// What the bearer may do; at least one role.
    pub roles: Vec<Role>,
}

impl Token {
    /// Returns true if the bearer may do what needs this role.
    pub(crate) fn allows(&self, role: Role) -> bool {
        self.roles.contains(&role) || self.roles.contains(&Role::Admin)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:***:{:?}", self.name, self.roles)
    }
}

/// Parses bearer tokens, one per entry.
pub(super) fn tokens<'a>(entries: impl IntoIterator<Item = &'a str>) -> Parsed<Vec<Token>> {
    let mut tokens: Vec<Token> = Vec::new();
    for (index, entry) in entries.into_iter().enumerate() {
        // The message names the number of the entry, not its text, which is a secret.
        let token = token(entry).map_err(|wrong| format!("entry {}: {wrong}", index + 1))?;
        if let Some(same) = tokens.iter().find(|other| other.secret == token.secret) {
            return Err(format!("{} and {} have the same token", same.name, token.name));
        }
        tokens.push(token);
    }
    Ok(tokens)
}

/// The fewest characters of a token.
const MIN_TOKEN: usize = 16;

fn token(entry: &str) -> Parsed<Token> {
    let wrong =
        || "write NAME:TOKEN:ROLE, with roles produce, consume, admin, joined by +".to_owned();
    let (name, rest) = entry.split_once(':').ok_or_else(wrong)?;
    let (secret, roles) = rest.rsplit_once(':').ok_or_else(wrong)?;
    if name.is_empty() || name.contains(char::is_whitespace) {
        return Err(wrong());
    }
    if secret.len() < MIN_TOKEN || !secret.bytes().all(|b| b.is_ascii_graphic() && b != b',') {
        return Err(format!(
            "the token of {name} is not {MIN_TOKEN} or more printable characters without spaces \
             or commas; `openssl rand -hex 24` makes one"
        ));
    }
    let roles = roles.split('+').map(|role| match role {
        "produce" => Ok(Role::Produce),
        "consume" => Ok(Role::Consume),
        "admin" => Ok(Role::Admin),
        other => Err(format!("{other:?} is not a role: produce, consume or admin")),
    });
    let roles = roles.collect::<Result<_, _>>()?;
    Ok(Token { name: name.to_owned(), secret: secret.to_owned(), roles })
}

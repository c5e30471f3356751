//! Who may call what: bearer tokens with roles.

use subtle::ConstantTimeEq;
use tonic::codegen::http::HeaderValue;

use super::status::ApiError;
use crate::config::{Role, Token};

/// The tokens that a broker knows. Without any, everyone may call everything.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tokens(Vec<Token>);

impl Tokens {
    /// Returns the tokens of a configuration. A token with an empty secret is never matched.
    pub(crate) fn new(tokens: Vec<Token>) -> Self {
        Self(tokens)
    }

    /// Allows or refuses a call by its path, `/package.Service/Method`, and its `authorization`.
    pub(crate) fn check(
        &self,
        path: &str,
        authorization: Option<&HeaderValue>,
    ) -> Result<(), ApiError> {
        let needed = needed(path);
        if self.0.is_empty() || needed.is_empty() {
            return Ok(());
        }
        let given = authorization.is_some();
        let token = authorization.and_then(bearer).and_then(|secret| self.find(secret));
        let token = token.ok_or(ApiError::Unauthenticated { given })?;
        match needed.iter().find(|role| !token.allows(**role)) {
            None => Ok(()),
            Some(role) => {
                Err(ApiError::PermissionDenied { role: name(*role), method: path.to_owned() })
            }
        }
    }

    /// Compares with every token, each in constant time: how long it takes says nothing about how close a guess was.
    fn find(&self, secret: &[u8]) -> Option<&Token> {
        self.0.iter().fold(None, |found, token| {
            if token.secret.as_bytes().ct_eq(secret).into() { Some(token) } else { found }
        })
    }
}

fn name(role: Role) -> &'static str {
    match role {
        Role::Produce => "produce",
        Role::Consume => "consume",
        Role::Admin => "admin",
    }
}

/// Returns the roles that a call needs, all of them; none for health, reflection and calls that do not exist.
fn needed(path: &str) -> &'static [Role] {
    let Some(rpc) = path.strip_prefix("/sluicegate.v1.") else { return &[] };
    match rpc.strip_prefix("QueueService/") {
        Some("Push" | "PushStream") => &[Role::Produce],
        Some("CommitAndPush") => &[Role::Consume, Role::Produce],
        Some(_) => &[Role::Consume],
        None => &[Role::Admin],
    }
}

fn bearer(authorization: &HeaderValue) -> Option<&[u8]> {
    let (scheme, secret) = authorization.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(secret).filter(|secret| !secret.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens() -> Tokens {
        let token = |secret: &str, roles: &[Role]| Token {
            name: "somebody".to_owned(),
            secret: secret.to_owned(),
            roles: roles.to_vec(),
        };
        Tokens::new(vec![
            token("p-secret", &[Role::Produce]),
            token("c-secret", &[Role::Consume]),
            token("both-secret", &[Role::Produce, Role::Consume]),
            token("a-secret", &[Role::Admin]),
            token("", &[Role::Admin]),
        ])
    }

    /// Returns "ok", the role that is missing, or why the token is refused.
    fn answer(path: &str, authorization: Option<&str>) -> &'static str {
        let authorization = authorization.map(|text| HeaderValue::from_str(text).unwrap());
        match tokens().check(path, authorization.as_ref()) {
            Ok(()) => "ok",
            Err(ApiError::PermissionDenied { role, .. }) => role,
            Err(ApiError::Unauthenticated { given: true }) => "unknown",
            Err(ApiError::Unauthenticated { given: false }) => "missing",
            Err(other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_token_allows_its_roles_calls_and_no_others() {
        let queue = |rpc: &str, token: &str| {
            answer(&format!("/sluicegate.v1.QueueService/{rpc}"), Some(&format!("Bearer {token}")))
        };
        for rpc in ["Push", "PushStream"] {
            assert_eq!(queue(rpc, "p-secret"), "ok");
            assert_eq!(queue(rpc, "c-secret"), "produce");
        }
        for rpc in
            ["Pop", "Reserve", "Consume", "ConsumeStream", "Commit", "Rollback", "Extend", "Move"]
        {
            assert_eq!(queue(rpc, "c-secret"), "ok");
            assert_eq!(queue(rpc, "p-secret"), "consume");
            assert_eq!(queue(rpc, "a-secret"), "ok");
        }
        assert_eq!(queue("CommitAndPush", "c-secret"), "produce");
        assert_eq!(queue("CommitAndPush", "p-secret"), "consume");
        assert_eq!(queue("CommitAndPush", "both-secret"), "ok");
        for path in ["/sluicegate.v1.AdminService/GetQueue", "/sluicegate.v1.ScheduleService/X"] {
            assert_eq!(answer(path, Some("Bearer both-secret")), "admin");
            assert_eq!(answer(path, Some("bearer a-secret")), "ok");
        }
    }

    #[test]
    fn a_missing_and_a_wrong_token_are_distinguished() {
        let path = "/sluicegate.v1.QueueService/Push";
        assert_eq!(answer(path, None), "missing");
        for wrong in
            ["", "Bearer", "Bearer ", "Bearer p-secreT", "Bearer p-secret ", "Basic p-secret"]
        {
            assert_eq!(answer(path, Some(wrong)), "unknown", "{wrong:?}");
        }
    }

    #[test]
    fn health_and_reflection_are_open() {
        for path in [
            "/grpc.health.v1.Health/Check",
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        ] {
            assert_eq!(answer(path, None), "ok");
        }
    }

    #[test]
    fn without_tokens_all_calls_are_open_and_secrets_are_not_printed() {
        assert!(Tokens::default().check("/sluicegate.v1.AdminService/GetQueue", None).is_ok());
        assert!(!format!("{:?}", tokens()).contains("secret"));
    }
}

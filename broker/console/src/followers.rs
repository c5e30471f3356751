//! How many pages follow the broker at a time. The others show what is new when they are loaded again.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;

/// The most pages.
const MOST: usize = 32;
/// The most pages of one token, so that its bearer leaves room for others. A browser has some six connections to one host.
const MOST_OF_TOKEN: usize = 12;

/// The number of pages that follow the broker, by token.
#[derive(Default)]
pub(crate) struct Followers(Arc<Mutex<HashMap<Option<String>, usize>>>);

/// A place for one page, until it is dropped.
pub(crate) struct Follower {
    all: Followers,
    token: Option<String>,
}

impl Followers {
    /// Returns a place for one more page of the bearer of this token, if there is any. Where there are no tokens, one may have all.
    pub(crate) fn begin(&self, token: Option<&str>) -> Option<Follower> {
        let mut all = self.0.lock();
        let token = token.map(str::to_owned);
        let of_token = all.get(&token).copied().unwrap_or_default();
        if all.values().sum::<usize>() >= MOST || token.is_some() && of_token >= MOST_OF_TOKEN {
            return None;
        }
        all.insert(token.clone(), of_token + 1);
        Some(Follower { all: Self(Arc::clone(&self.0)), token })
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let mut all = self.all.0.lock();
        if let Some(of_token) = all.get_mut(&self.token) {
            *of_token -= 1;
            if *of_token == 0 {
                all.remove(&self.token);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bearer_of_a_token_leaves_room_for_others() {
        let followers = Followers::default();
        let begin = |token: &str| followers.begin(Some(token));
        let own: Vec<_> = std::iter::from_fn(|| begin("own")).collect();
        assert_eq!(own.len(), MOST_OF_TOKEN);
        let others: Vec<_> = (0..MOST).filter_map(|n| begin(&n.to_string())).collect();
        assert_eq!(others.len(), MOST - MOST_OF_TOKEN);
        drop(own);
        assert!(begin("own").is_some());
        drop(others);
        assert!(followers.0.lock().is_empty());
    }

    #[test]
    fn without_tokens_one_browser_may_have_all_places() {
        let followers = Followers::default();
        let all: Vec<_> = std::iter::from_fn(|| followers.begin(None)).collect();
        assert_eq!(all.len(), MOST);
    }
}

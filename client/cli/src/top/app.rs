//! What is on the screen, and what keys do.

use std::time::Instant;

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::{
    board::{Board, Sort},
    feed::{Detail, News},
};

/// What a key asks for beyond the screen.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Nothing,
    Quit,
}

/// What the keys are for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Mode {
    #[default]
    List,
    /// The filter is being typed.
    Filter,
    /// One queue.
    Queue,
    Help,
}

/// All that is shown.
pub(super) struct App {
    pub(super) board: Board,
    pub(super) server: String,
    pub(super) has_colours: bool,
    pub(super) mode: Mode,
    pub(super) sort: Sort,
    pub(super) reverse: bool,
    pub(super) filter: String,
    /// The name of the selected queue: it stays selected wherever it is sorted to.
    pub(super) selected: Option<String>,
    /// The first row on the screen, as last drawn.
    pub(super) first: usize,
    /// How many rows a page has, as last drawn.
    pub(super) page: usize,
    /// The queue of [`Mode::Queue`].
    pub(super) open: Option<String>,
    pub(super) detail: Option<Detail>,
    /// Why the figures are not up to date.
    pub(super) problem: Option<String>,
    pub(super) is_loaded: bool,
}

impl App {
    pub(super) fn new(server: String, has_colours: bool) -> Self {
        Self {
            board: Board::default(),
            server,
            has_colours,
            mode: Mode::default(),
            sort: Sort::Ready,
            reverse: false,
            filter: String::new(),
            selected: None,
            first: 0,
            page: 1,
            open: None,
            detail: None,
            problem: None,
            is_loaded: false,
        }
    }

    /// Takes over what has come from the broker.
    pub(super) fn hear(&mut self, news: News, now: Instant) {
        match news {
            News::Stats(stats) => {
                self.board.counted(stats, now);
                (self.is_loaded, self.problem) = (true, None);
            }
            News::Queues(queues) => {
                self.board.listed(&queues);
                // Of a broker without queues no figures come.
                self.is_loaded |= queues.is_empty();
            }
            News::Detail(detail) if self.open.as_ref() == Some(&detail.queue) => {
                self.detail = Some(*detail);
            }
            News::Detail(_) => {} // of a queue that was left meanwhile
            News::Problem(problem) => self.problem = Some(problem),
        }
    }

    /// Does what a key is for.
    pub(super) fn press(&mut self, key: KeyEvent, now: Instant) -> Wish {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => Wish::Quit,
                _ => Wish::Nothing,
            };
        }
        match self.mode {
            Mode::Filter => self.press_in_filter(key.code),
            _ if key.code == KeyCode::Char('q') => return Wish::Quit,
            Mode::Help => self.mode = Mode::List,
            Mode::Queue => self.press_in_queue(key.code),
            Mode::List => self.press_in_list(key.code, now),
        }
        Wish::Nothing
    }

    fn press_in_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.mode = Mode::List,
            KeyCode::Esc => {
                self.filter.clear();
                self.mode = Mode::List;
            }
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(c) => self.filter.push(c),
            _ => {}
        }
    }

    fn press_in_queue(&mut self, code: KeyCode) {
        if matches!(code, KeyCode::Esc | KeyCode::Left | KeyCode::Backspace | KeyCode::Enter) {
            (self.mode, self.open, self.detail) = (Mode::List, None, None);
        }
    }

    fn press_in_list(&mut self, code: KeyCode, now: Instant) {
        match code {
            KeyCode::Up | KeyCode::Char('k') => self.go(now, |at, _| at.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.go(now, |at, _| at + 1),
            KeyCode::PageUp => self.go(now, usize::saturating_sub),
            KeyCode::PageDown => self.go(now, |at, page| at + page),
            KeyCode::Home | KeyCode::Char('g') => self.go(now, |_, _| 0),
            KeyCode::End | KeyCode::Char('G') => self.go(now, |_, _| usize::MAX),
            KeyCode::Char('/') => self.mode = Mode::Filter,
            KeyCode::Char('?') => self.mode = Mode::Help,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Enter | KeyCode::Right => {
                self.open = self.name_at(self.place(now).unwrap_or(0), now);
                if self.open.is_some() {
                    (self.mode, self.detail) = (Mode::Queue, None);
                }
            }
            KeyCode::Char(c) => {
                let Some((sort, _)) = Sort::ALL.iter().find(|(_, key)| *key == c) else { return };
                self.reverse = *sort == self.sort && !self.reverse;
                self.sort = *sort;
            }
            _ => {}
        }
    }

    /// Selects the row that `to` returns for the one that is selected and the rows of a page.
    fn go(&mut self, now: Instant, to: fn(usize, usize) -> usize) {
        let last = self.shown(now).len().saturating_sub(1);
        let at = match self.place(now) {
            Some(at) => to(at, self.page).min(last),
            None => 0,
        };
        self.selected = self.name_at(at, now);
    }

    /// Returns where the selected queue is among the rows that are shown.
    pub(super) fn place(&self, now: Instant) -> Option<usize> {
        let selected = self.selected.as_ref()?;
        self.shown(now).iter().position(|row| row.stats.queue == *selected)
    }

    fn name_at(&self, at: usize, now: Instant) -> Option<String> {
        self.shown(now).get(at).map(|row| row.stats.queue.clone())
    }

    pub(super) fn shown(&self, now: Instant) -> Vec<&super::board::Row> {
        self.board.shown(&self.filter, self.sort, self.reverse, now)
    }
}

#[cfg(test)]
mod tests {
    use sluicegate_client::proto::QueueStats;

    use super::*;

    fn app() -> App {
        let mut app = App::new("http://b".to_owned(), false);
        let stats = |queue: &str, ready| QueueStats {
            queue: queue.to_owned(),
            ready,
            ..QueueStats::default()
        };
        let queues = vec![stats("a", 1), stats("b", 2), stats("c", 3)];
        app.hear(News::Stats(queues), Instant::now());
        app
    }

    fn press(app: &mut App, code: KeyCode) -> Wish {
        app.press(KeyEvent::new(code, KeyModifiers::NONE), Instant::now())
    }

    #[test]
    fn the_selection_follows_its_queue_and_enter_opens_it() {
        let mut app = app();
        press(&mut app, KeyCode::Down);
        press(&mut app, KeyCode::Down);
        assert_eq!(app.selected.as_deref(), Some("b"));
        press(&mut app, KeyCode::Char('n'));
        assert_eq!(app.selected.as_deref(), Some("b"));
        press(&mut app, KeyCode::End);
        assert_eq!(app.selected.as_deref(), Some("c"));
        press(&mut app, KeyCode::Enter);
        assert_eq!((app.mode, app.open.as_deref()), (Mode::Queue, Some("c")));
        let other = Detail { queue: "a".to_owned(), ..Detail::default() };
        app.hear(News::Detail(Box::new(other)), Instant::now());
        assert!(app.detail.is_none(), "of another queue");
        press(&mut app, KeyCode::Esc);
        assert_eq!((app.mode, app.open.as_deref()), (Mode::List, None));
    }

    #[test]
    fn what_is_typed_into_the_filter_does_nothing_else() {
        let mut app = app();
        press(&mut app, KeyCode::Char('/'));
        for key in "quit".chars() {
            assert_eq!(press(&mut app, KeyCode::Char(key)), Wish::Nothing);
        }
        press(&mut app, KeyCode::Backspace);
        assert_eq!(app.filter, "qui");
        assert!(app.shown(Instant::now()).is_empty());
        press(&mut app, KeyCode::Esc);
        assert_eq!(app.shown(Instant::now()).len(), 3);
        assert_eq!(press(&mut app, KeyCode::Char('q')), Wish::Quit);
    }

    #[test]
    fn the_key_of_a_column_sorts_and_reverses() {
        let mut app = app();
        assert_eq!((app.sort, app.reverse), (Sort::Ready, false));
        press(&mut app, KeyCode::Char('r'));
        assert_eq!((app.sort, app.reverse), (Sort::Ready, true));
        press(&mut app, KeyCode::Char('o'));
        assert_eq!((app.sort, app.reverse), (Sort::Out, false));
    }

    #[test]
    fn control_c_quits_wherever_one_is() {
        for mode in [Mode::List, Mode::Filter, Mode::Queue, Mode::Help] {
            let mut app = App { mode, ..app() };
            let key = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
            assert_eq!(app.press(key, Instant::now()), Wish::Quit, "{mode:?}");
        }
    }
}

//! How things look: colours and numbers.

use ratatui::style::{Color, Modifier, Style};

use super::{app::App, board::Mark};

/// Colours, or none.
#[derive(Debug, Clone, Copy)]
pub(super) struct Styles {
    has_colours: bool,
}

impl Styles {
    pub(super) fn of(app: &App) -> Self {
        Self { has_colours: app.has_colours }
    }

    fn colour(self, colour: Color) -> Style {
        if self.has_colours { Style::new().fg(colour) } else { Style::new() }
    }

    pub(super) fn head() -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    pub(super) fn quiet(self) -> Style {
        self.colour(Color::DarkGray)
    }

    pub(super) fn good(self) -> Style {
        self.colour(Color::Green)
    }

    pub(super) fn bad(self) -> Style {
        self.colour(Color::Red)
    }

    pub(super) fn mark(self, mark: Mark) -> Style {
        match mark {
            Mark::Paused => self.colour(Color::Yellow),
            Mark::Stuck => self.bad(),
            Mark::DeadLetters => self.colour(Color::Magenta),
        }
    }
}

/// Shows a count in groups of three digits; from ten million on in millions.
pub(super) fn count(n: i64) -> String {
    if n >= 10_000_000 {
        return format!("{:.1}M", n as f64 / 1e6);
    }
    let digits = n.to_string();
    let mut shown = String::with_capacity(digits.len() + 2);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            shown.push(',');
        }
        shown.push(digit);
    }
    shown
}

/// Shows items per second; nothing if there are none.
pub(super) fn rate(rate: f64) -> String {
    match rate {
        0.0 => String::new(),
        rate if rate < 10.0 => format!("{rate:.1}"),
        rate => count(rate.round() as i64),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use ratatui::{Frame, Terminal, backend::TestBackend, buffer::Buffer};

    /// Returns the lines of a screen on which something is drawn, and the screen.
    pub(in crate::top) fn screen(
        width: u16,
        height: u16,
        draw: impl FnOnce(&mut Frame<'_>),
    ) -> (Vec<String>, Buffer) {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(draw).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let line = |y: u16| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        ((0..height).map(|y| line(y).trim_end().to_owned()).collect(), buffer)
    }
}

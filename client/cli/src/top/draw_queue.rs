//! The screen of one queue: figures, settings, consumers, and the latest dead letters.

use std::time::{Duration, Instant, SystemTime};

use prost_types::Timestamp;
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    text::{Line, Span},
    widgets::{Block, Paragraph, Row as TableRow, Table},
};
use sluicegate_client::proto::{Consumer, Item, Queue};

use super::{
    app::App,
    feed::DeadLetters,
    style::{Styles, count, rate},
};
use crate::{
    json,
    output::{harmless, preview},
    values,
};

pub(super) fn draw(frame: &mut Frame<'_>, app: &App, area: Rect, now: Instant) {
    let Some(queue) = &app.open else { return };
    let [figures, middle, below] =
        Layout::vertical([Constraint::Length(4), Constraint::Fill(3), Constraint::Fill(2)])
            .areas(area);
    let [left, right] =
        Layout::horizontal([Constraint::Percentage(40), Constraint::Percentage(60)]).areas(middle);
    draw_figures(frame, app, queue, figures, now);
    let detail = app.detail.as_ref();
    let block = |title: String| Block::bordered().title(harmless(&title, false));
    match detail.and_then(|detail| detail.settings.as_ref()) {
        Some(Ok(settings)) => {
            let shown = Paragraph::new(settings_lines(settings)).block(block("Settings".into()));
            frame.render_widget(shown, left);
        }
        other => draw_missing(frame, app, other.and_then(|of| of.as_ref().err()), "Settings", left),
    }
    match detail.and_then(|detail| detail.consumers.as_ref()) {
        Some(Ok(consumers)) => draw_consumers(frame, app, consumers, right),
        other => {
            draw_missing(frame, app, other.and_then(|of| of.as_ref().err()), "Consumers", right);
        }
    }
    match detail.and_then(|detail| detail.dead_letters.as_ref()) {
        Some(Ok(dead_letters)) => draw_dead_letters(frame, app, dead_letters, below),
        other => {
            draw_missing(frame, app, other.and_then(|of| of.as_ref().err()), "Dead letters", below);
        }
    }
}

/// Says why there is nothing to show: it is on its way, or the broker refuses it.
fn draw_missing(frame: &mut Frame<'_>, app: &App, why: Option<&String>, title: &str, area: Rect) {
    let text = match why {
        Some(why) => Span::styled(harmless(why, false), Styles::of(app).bad()),
        None => Span::styled("…", Styles::of(app).quiet()),
    };
    let block = Block::bordered().title(title.to_owned());
    frame.render_widget(Paragraph::new(Line::from(text)).block(block), area);
}

fn draw_figures(frame: &mut Frame<'_>, app: &App, queue: &str, area: Rect, now: Instant) {
    let name = Span::styled(harmless(queue, false), Styles::head());
    let Some(row) = app.board.row(queue) else {
        let gone = Span::styled("  is no longer there", Styles::of(app).bad());
        frame.render_widget(Paragraph::new(Line::from(vec![name, gone])), area);
        return;
    };
    let stats = &row.stats;
    let (come, gone) = row.rates();
    let or_none = |rate: String| if rate.is_empty() { "0".to_owned() } else { rate };
    let oldest = match row.oldest(now) {
        Some(age) => format!("   oldest ready for {}", values::about(age)),
        None => String::new(),
    };
    let paused = if row.paused { "  paused" } else { "" };
    let lines = vec![
        Line::from(vec![name, Span::raw(paused)]),
        Line::from(format!(
            "{} ready   {} delayed   {} reserved   {} blocked   {} in its history{oldest}",
            count(stats.ready),
            count(stats.delayed),
            count(stats.reserved),
            count(stats.blocked),
            count(stats.processed),
        )),
        Line::from(format!(
            "{}/s in   {}/s out   since its creation: {} pushed, {} delivered, {} committed, {} rolled back, {} dead-lettered",
            or_none(rate(come)),
            or_none(rate(gone)),
            count(stats.pushed),
            count(stats.delivered),
            count(stats.committed),
            count(stats.rolled_back),
            count(stats.dead_lettered),
        )),
    ];
    frame.render_widget(Paragraph::new(lines), area);
}

/// Returns what is set, a line each, in the words of `sluice queue get`.
fn settings_lines(settings: &Queue) -> Vec<Line<'static>> {
    let value = json::queue(settings);
    let Some(fields) = value.as_object() else { return Vec::new() };
    let shown = fields.iter().filter(|(name, _)| *name != "name");
    let line = |(name, value): (&String, &serde_json::Value)| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        Line::from(format!("{name:<17} {}", harmless(&text, false)))
    };
    shown.map(line).collect()
}

fn draw_consumers(frame: &mut Frame<'_>, app: &App, consumers: &[Consumer], area: Rect) {
    let block = Block::bordered().title(format!("Consumers of all brokers ({})", consumers.len()));
    if consumers.is_empty() {
        let none = Line::styled("nobody", Styles::of(app).quiet());
        frame.render_widget(Paragraph::new(none).block(block), area);
        return;
    }
    let rows = consumers.iter().map(|consumer| {
        let oldest = consumer.oldest_since.as_ref().map(since).map(values::about);
        TableRow::new([
            harmless(if consumer.name.is_empty() { "-" } else { &consumer.name }, false),
            harmless(&consumer.peer, false),
            format!("{} of {}", consumer.in_flight, consumer.max_in_flight),
            oldest.unwrap_or_default(),
            count(consumer.committed),
        ])
    });
    let widths = [
        Constraint::Min(8),
        Constraint::Length(21),
        Constraint::Length(13),
        Constraint::Length(8),
        Constraint::Length(10),
    ];
    let head = TableRow::new(["NAME", "PEER", "HOLDS", "OLDEST", "COMMITTED"]);
    frame.render_widget(
        Table::new(rows, widths).header(head.style(Styles::head())).block(block),
        area,
    );
}

fn draw_dead_letters(frame: &mut Frame<'_>, app: &App, dead_letters: &DeadLetters, area: Rect) {
    let DeadLetters { queue, items, has_more } = dead_letters;
    let title = match queue {
        None => "Dead letters: it has no dead-letter queue".to_owned(),
        Some(queue) if *has_more => {
            format!("Dead letters in {queue}, the latest of the first {}", items.len())
        }
        Some(queue) => format!("Dead letters in {queue} ({})", items.len()),
    };
    let block = Block::bordered().title(harmless(&title, false));
    if items.is_empty() {
        let none = Line::styled("none", Styles::of(app).good());
        frame.render_widget(Paragraph::new(none).block(block), area);
        return;
    }
    let rows = items.iter().take(usize::from(area.height)).map(|item| {
        TableRow::new([
            item.dead_letter_time.as_ref().map(since).map(values::about).unwrap_or_default(),
            item.dead_letter_attempts.to_string(),
            harmless(&item.last_reason, false),
            payload(item),
            harmless(&item.id, false),
        ])
    });
    let widths = [
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Fill(1),
        Constraint::Fill(1),
        Constraint::Length(26),
    ];
    let head = TableRow::new(["AGO", "ATTEMPTS", "REASON", "PAYLOAD", "ID"]);
    frame.render_widget(
        Table::new(rows, widths).header(head.style(Styles::head())).block(block),
        area,
    );
}

fn payload(item: &Item) -> String {
    preview(&item.payload, 80)
}

/// Returns how long ago that was, by the clock of this machine.
fn since(time: &Timestamp) -> Duration {
    let time = SystemTime::try_from(*time).unwrap_or(SystemTime::UNIX_EPOCH);
    SystemTime::now().duration_since(time).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use ratatui::buffer::Buffer;
    use sluicegate_client::proto::QueueStats;

    use super::*;
    use crate::top::{
        app::Mode,
        feed::{Detail, News},
        style::tests::screen,
    };

    fn drawn(app: &App, now: Instant, width: u16, height: u16) -> (Vec<String>, Buffer) {
        screen(width, height, |frame| draw(frame, app, frame.area(), now))
    }

    fn app(now: Instant) -> App {
        let mut app = App::new("http://b:7400".to_owned(), false);
        let stats = QueueStats {
            queue: "orders".to_owned(),
            ready: 4,
            dead_lettered: 2,
            ..QueueStats::default()
        };
        app.hear(News::Stats(vec![stats]), now);
        (app.mode, app.open) = (Mode::Queue, Some("orders".to_owned()));
        app
    }

    #[test]
    fn a_queue_is_shown_with_settings_consumers_and_dead_letters() {
        let now = Instant::now();
        let mut app = app(now);
        let settings =
            Queue { name: "orders".to_owned(), max_attempts: Some(7), ..Queue::default() };
        let consumer = Consumer {
            name: "w\u{1b}[2J".to_owned(),
            peer: "10.0.0.1:5000".to_owned(),
            in_flight: 3,
            max_in_flight: 32,
            ..Consumer::default()
        };
        let dead = Item {
            id: "id-1".to_owned(),
            last_reason: "no such \u{9b}31m customer".to_owned(),
            dead_letter_attempts: 25,
            dead_letter_time: Some(SystemTime::now().into()),
            payload: "apples\u{1b}]0;x\u{7}".into(),
            ..Item::default()
        };
        let queue = Some("orders.dead".to_owned());
        app.hear(
            News::Detail(Box::new(Detail {
                queue: "orders".to_owned(),
                settings: Some(Ok(settings)),
                consumers: Some(Ok(vec![consumer])),
                dead_letters: Some(Ok(DeadLetters { queue, items: vec![dead], has_more: false })),
            })),
            now,
        );
        let (lines, buffer) = drawn(&app, now, 120, 30);
        let all = lines.join("\n");
        for part in [
            "4 ready   0 delayed",
            "2 dead-lettered",
            "max_attempts      7",
            "w\\u{1b}[2J",
            "3 of 32",
            "Dead letters in orders.dead (1)",
            "no such \\u{9b}31m customer",
            "apples ]0;x",
        ] {
            assert!(all.contains(part), "{part}:\n{all}");
        }
        let controls = |cell: &ratatui::buffer::Cell| cell.symbol().chars().any(char::is_control);
        assert!(!buffer.content.iter().any(controls));
    }

    #[test]
    fn what_may_not_be_read_says_so_in_its_place() {
        let now = Instant::now();
        let mut app = app(now);
        assert!(drawn(&app, now, 100, 20).0.join("\n").contains('…'), "on its way");
        let refused = || "the token may not view".to_owned();
        app.hear(
            News::Detail(Box::new(Detail {
                queue: "orders".to_owned(),
                settings: Some(Err("not there".to_owned())),
                consumers: Some(Err(refused())),
                dead_letters: None,
            })),
            now,
        );
        let all = drawn(&app, now, 100, 20).0.join("\n");
        assert!(all.contains("not there") && all.contains(&refused()), "{all}");
    }

    #[test]
    fn a_queue_that_is_gone_is_said_to_be_gone() {
        let now = Instant::now();
        let mut app = app(now);
        app.hear(News::Queues(vec![]), now);
        assert!(drawn(&app, now, 100, 20).0[0].contains("orders  is no longer there"));
    }
}

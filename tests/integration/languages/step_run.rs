//! Runs one step: actions on the world once, commands of clients in all languages at the same time.

use std::{collections::BTreeMap, time::Duration};

use futures::future::join_all;
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::{
    report::{Names, Reported, difference, error_text, is_wanted},
    runner::Runner,
    scene::{Scene, World},
    script::{Action, Command, Content, Lacks, Step},
};

/// An action that takes longer is named, so that a slow step is understood from its output.
const SLOW: Duration = Duration::from_secs(15);

/// Result of a step for one language.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    Ok,
    Failed(String),
    NotOffered(String),
}

/// One language in one step.
struct Player<'a> {
    runner: &'a mut Runner,
    outcome: Outcome,
    reported: Reported,
    variables: BTreeMap<String, Value>,
    /// Names of the step begin with this for the runner, so that a late report of another step is
    /// not taken for one of this step.
    prefix: String,
    names: Names,
    resource: String,
}

/// Runs a step, and returns the outcome of each runner.
pub(super) async fn run(
    world: &mut World,
    runners: &mut [Runner],
    lacks: &Lacks,
    number: usize,
    step: &Step,
) -> Vec<Outcome> {
    let mut scene = Scene::start(world, step).await;
    let variables = scene.variables();
    let mut players: Vec<Player> = runners
        .iter_mut()
        .map(|runner| Player {
            outcome: not_offered(runner, lacks, step).map_or(Outcome::Ok, Outcome::NotOffered),
            runner,
            reported: Reported::default(),
            variables: variables.clone(),
            prefix: format!("{number}."),
            names: scene.names.clone(),
            resource: step.resource.clone(),
        })
        .collect();
    if step.connect {
        let Value::Object(connect) = scene.connect() else { unreachable!("it is an object") };
        all(&mut players, &Action::Connect(connect)).await;
    }
    for action in &step.actions {
        if players.iter().all(|player| player.outcome != Outcome::Ok) {
            break;
        }
        let started = Instant::now();
        act(&mut scene, &mut players, action).await;
        if started.elapsed() > SLOW {
            println!("{} took {:.1} s: {action:?}", step.name, started.elapsed().as_secs_f64());
        }
    }
    compare(&mut players);
    for player in &mut players {
        if let Err(why) = player.runner.reset().await {
            player.outcome = Outcome::Failed(format!("at the end of the step: {why}"));
        }
    }
    let outcomes = players.into_iter().map(|player| player.outcome).collect();
    scene.end().await;
    outcomes
}

fn not_offered(runner: &Runner, lacks: &Lacks, step: &Step) -> Option<String> {
    let needed = step.needs.as_ref().filter(|needed| runner.lacks.contains(needed))?;
    Some(lacks[runner.language][needed].clone())
}

/// All languages must have received the same events: the same versions and the same bytes.
fn compare(players: &mut [Player]) {
    let passed: Vec<usize> = (0..players.len()).filter(|at| players[*at].outcome == Outcome::Ok).collect();
    let Some((first, others)) = passed.split_first() else { return };
    for other in others {
        if let Some(why) = difference(&players[*first].reported.events, &players[*other].reported.events) {
            players[*other].outcome = Outcome::Failed(why);
        }
    }
}

/// Runs an action on the world, or a command in all languages.
async fn act(scene: &mut Scene<'_>, players: &mut [Player<'_>], action: &Action) {
    match action {
        Action::Create(change) | Action::Patch(change) => {
            let version = match action {
                Action::Create(_) => scene.create(change).await,
                _ => scene.patch(change).await,
            };
            if let Some(name) = &change.keep {
                for player in players {
                    player.variables.insert(format!("${name}"), version.clone());
                }
            }
        }
        Action::Delete(name) => scene.delete(name).await,
        Action::DeleteWhere(labels) => scene.delete_where(labels).await,
        Action::Grant(user) => scene.grant(user).await,
        Action::Revoke(user) => scene.revoke(user).await,
        Action::RotateToken(secret) => scene.rotate_token(secret).await,
        Action::EndToken(secret) => scene.end_token(secret).await,
        Action::Cut => scene.cut(),
        Action::Mend => scene.mend(),
        Action::Freeze => scene.freeze(),
        Action::LeadToSecond => scene.lead_to_second(),
        Action::Kill => scene.kill(),
        Action::Start => scene.restart().await,
        Action::Hang => scene.signal("STOP"),
        Action::Wake => scene.signal("CONT"),
        Action::Drain => scene.drain(),
        Action::Disconnect => scene.disconnect().await,
        Action::CutUpstream => scene.cut_upstream().await,
        Action::LoseHistory => scene.lose_history().await,
        Action::Served(encoding) => {
            let count = players.iter().filter(|player| player.outcome == Outcome::Ok).count();
            scene.served(encoding, count).await;
        }
        _ => all(players, action).await,
    }
}

/// Runs a command in all languages that have not failed.
async fn all(players: &mut [Player<'_>], action: &Action) {
    join_all(players.iter_mut().filter(|player| player.outcome == Outcome::Ok).map(async |player| {
        if let Err(why) = player.run(action).await {
            player.outcome = Outcome::Failed(why);
        }
    }))
    .await;
}

impl Player<'_> {
    async fn run(&mut self, action: &Action) -> Result<(), String> {
        match action {
            Action::Connect(command) => self.command("connect", command).await,
            Action::List(command) => self.command("list", command).await,
            Action::Get(command) => self.command("get", command).await,
            Action::ListResources(command) => self.command("list_resources", command).await,
            Action::Watch(command) => self.command("watch", command).await,
            Action::Changes(command) => self.command("changes", command).await,
            Action::Informer(command) => self.command("informer", command).await,
            Action::Handler(command) => self.command("handler", command).await,
            Action::WaitUntil(command) => self.command("wait_until", command).await,
            Action::WaitForSync(name) => self.command("wait_for_sync", &named(name)).await,
            Action::Close(name) => self.command("close", &named(name)).await,
            Action::Store(store) => {
                let mut command = named(&store.of);
                command.insert("gives".to_owned(), json!(store.has));
                self.command("store", &command).await
            }
            Action::Expect(expect) => {
                let source = format!("{}{}", self.prefix, expect.of);
                self.reported.expect(self.runner, &source, expect, &self.names).await
            }
            Action::Content(content) => self.content(content),
            Action::Keep(keep) => {
                let resume = self.reported.resume.get(&keep.of).ok_or(format!("{} has no version", keep.of))?;
                let [version, cluster] = resume.clone();
                self.keep(&keep.name, &json!(version), &json!(cluster));
                Ok(())
            }
            Action::Same([one, other]) => {
                let value = |name: &str| self.variables.get(name).cloned().ok_or(format!("there is no {name}"));
                let one = value(one)?;
                let other = value(other)?;
                (one == other).then_some(()).ok_or(format!("{one} is not {other}"))
            }
            other => panic!("{other:?} is an action on the world"),
        }
    }

    /// Sends a command, and compares its answer with the script.
    async fn command(&mut self, op: &str, command: &Command) -> Result<(), String> {
        let mut fields = command.clone();
        let [gives, error, keep] = ["gives", "error", "keep"].map(|name| fields.remove(name));
        for value in fields.values_mut() {
            if let Some(name) = value.as_str().filter(|text| text.starts_with('$')) {
                *value = self.variables.get(name).cloned().ok_or(format!("there is no {name}"))?;
            }
        }
        let is_read = matches!(op, "list" | "get" | "watch" | "changes" | "informer");
        if is_read {
            fields.entry("resource").or_insert(json!(self.resource));
            fields.entry("namespace").or_insert(json!(self.names.namespace));
        }
        if is_read || op == "list_resources" {
            fields.entry("client").or_insert(json!("client"));
        }
        for name in ["as", "of", "client"] {
            if let Some(value) = fields.get_mut(name) {
                *value = json!(format!("{}{}", self.prefix, value.as_str().unwrap_or_default()));
            }
        }
        fields.insert("op".to_owned(), json!(op));
        let source = command.get("as").or(command.get("of")).and_then(Value::as_str).unwrap_or(op);
        match (self.runner.run(Value::Object(fields)).await?, error.as_ref().and_then(Value::as_str)) {
            (Ok(given), None) => self.check_given(op, source, &given, gives.as_ref(), keep.as_ref()),
            (Err(failed), None) => Err(format!("{op}: {}: {}", error_text(&failed), failed["message"])),
            (Ok(given), Some(wanted)) => Err(format!("{op}: expected the error {wanted:?}, got {given}")),
            (Err(failed), Some(wanted)) => {
                let got = format!("error {}", error_text(&failed));
                let is_wanted = is_wanted(&format!("error {wanted}"), &got);
                is_wanted.then_some(()).ok_or(format!("{op}: expected {wanted:?}, got {got:?}: {}", failed["message"]))
            }
        }
    }

    fn check_given(
        &mut self,
        op: &str,
        source: &str,
        given: &Value,
        gives: Option<&Value>,
        keep: Option<&Value>,
    ) -> Result<(), String> {
        for object in given["objects"].as_array().into_iter().flatten() {
            let key = (source.to_owned(), self.names.short(&object["key"]));
            let text = object["object"].as_str().unwrap_or_default().to_owned();
            // A list has no events, but languages must have received the same bytes.
            let events = self.reported.events.entry(source.to_owned()).or_default();
            events.push([key.1.clone(), String::new(), text.clone()]);
            self.reported.objects.insert(key, text);
        }
        if let Some(name) = keep.and_then(Value::as_str) {
            self.keep(name, &given["version"], &given["cluster"]);
        }
        let Some(gives) = gives else { return Ok(()) };
        let got: Value = match op {
            "list" | "get" => {
                given["objects"].as_array().into_iter().flatten().map(|it| self.names.short(&it["key"])).collect()
            }
            "store" => {
                let mut keys: Vec<_> = given["objects"].as_object().into_iter().flat_map(Map::keys).collect();
                keys.sort();
                keys.into_iter().map(|key| self.names.short(&json!(key))).collect()
            }
            "wait_until" => given["reached"].clone(),
            "list_resources" => given["resources"].clone(),
            _ => given.clone(),
        };
        (*gives == got).then_some(()).ok_or(format!("{op}: expected {gives}, got {got}"))
    }

    fn keep(&mut self, name: &str, version: &Value, cluster: &Value) {
        self.variables.insert(format!("${name}"), version.clone());
        self.variables.insert(format!("${name}.cluster"), cluster.clone());
    }

    fn content(&self, content: &Content) -> Result<(), String> {
        let Content { of, name, is, has, lacks } = content;
        let key = (of.clone(), name.clone());
        let text = self.reported.objects.get(&key).ok_or(format!("{of} has reported no object {name}"))?;
        let object: Value = serde_json::from_str(text).map_err(|error| format!("{name}: {error} in {text:?}"))?;
        if let Some(is) = is
            && *is != object
        {
            return Err(format!("{name}: expected {is}, got {object}"));
        }
        for (paths, expected) in [(has, true), (lacks, false)] {
            if let Some(path) = paths.iter().find(|path| object.pointer(path).is_some() != expected) {
                let verb = if expected { "has no" } else { "has" };
                return Err(format!("{name} {verb} {path}: {object}"));
            }
        }
        Ok(())
    }
}

/// A command that has only a name.
fn named(name: &str) -> Command {
    Command::from_iter([("as".to_owned(), json!(name))])
}

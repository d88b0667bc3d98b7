// Elements from text: the text of documents enters the page only as text nodes, never as markup.

/** Create an element; properties with a dash are attributes, children are nodes or text, null ones are left out. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

/** Create text that only screen readers read. */
export const spoken = text => element("span", {className: "spoken"}, text);

/** Return the element with this id. */
export const byId = id => document.getElementById(id);
